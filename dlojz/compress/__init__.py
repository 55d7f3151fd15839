"""Compression of a trained teacher: distillation, quantization, pruning. Importing this package loads no torch.

Every method ends in a `Shrunk`: a model, the tensors that a file keeps of it, and the bytes predicted of them.

Source: Hinton et al. 2015 (arXiv 1503.02531) for distillation; Gholami et al. 2021 (arXiv 2103.13630) for quantization;
Zhu and Gupta 2017 (arXiv 1710.01878), Frankle and Carbin 2019 (arXiv 1803.03635), Mishra et al. 2021 (arXiv 2104.08378)
for pruning.
"""
