"""Triton kernels of the routed experts. Imported only where ``moe.experts=triton`` asks for them."""
