"""Bridges to other libraries. Each is a module of its own that imports its library only when asked to register."""
