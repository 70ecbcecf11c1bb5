"""Methods that propose draft tokens, one file each, and how many draft tokens pay."""
