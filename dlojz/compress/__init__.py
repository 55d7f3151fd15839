"""Compression of a trained teacher: distillation, quantization, pruning. Importing this package loads no torch.

Source: Hinton et al. 2015 (arXiv 1503.02531) for distillation; Gholami et al. 2021 (arXiv 2103.13630) for quantization;
Frankle and Carbin 2019 (arXiv 1803.03635), Mishra et al. 2021 (arXiv 2104.08378) for pruning.
"""
