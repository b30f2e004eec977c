"""The strict Triton interpreter, in which verification runs kernels without a GPU."""
