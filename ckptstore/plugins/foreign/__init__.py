"""Files of other programs: what they are, and what is in them, without running what they hold."""
