"""Errors, meshes, layouts, processes."""
