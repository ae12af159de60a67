"""What a log of vLLM, NCCL, the driver or the kernel says about a failure, and what to do. Pure."""
