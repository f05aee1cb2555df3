"""Rules, pattern matching, and rule files."""
