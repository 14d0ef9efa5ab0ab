"""The Triton kernels. Nothing here is imported until an operator runs on a device that needs it."""
