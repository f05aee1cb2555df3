"""Rules and a tree → a Resolution."""
