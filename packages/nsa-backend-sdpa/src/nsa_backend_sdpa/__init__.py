"""Native Sparse Attention on plain PyTorch: every slot, forward and backward, on the CPU and on any
GPU.
"""
