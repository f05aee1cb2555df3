"""Resolve rules and a tree to a Resolution."""
