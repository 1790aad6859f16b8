"""Published figures of ideas from papers and issues, and what the same ideas do here."""
