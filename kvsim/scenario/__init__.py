"""What is asked: scenario files, their sections, and the workloads and scenarios that are shipped."""
