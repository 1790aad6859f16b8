"""What the commands print for people, one module for each kind of result; all of it needs Rich."""
