"""A package, so that pytest does not import the folder above as ``site`` and hide Python's own module of that name."""
