"""Warp-specialised kernels for sm_90, written in Gluon, Triton's lower-level dialect.

Nothing outside this package imports Gluon, and this package is imported only after :func:`flashtri_core.target` has found
compute capability 9.x and a Triton version that the ahead-of-time tests cover. Everything else takes the plain kernels.
"""
