"""Where draft tokens come from, one file a method, and how many pay."""
