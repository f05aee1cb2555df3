"""Errors, meshes, layouts, processes, TPU topologies."""
