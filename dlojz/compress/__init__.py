"""From the big model to the small one: distillation, quantization, pruning, and what each of them gives and takes.

Every method starts from the same trained teacher and ends in a `Shrunk`: a model that answers, the tensors that a file
would keep of it, and the bytes that were predicted of them before anything was computed. Importing this package loads
no torch.

    task      the data, divided into what is learnt from and what is held out
    fitting   one training loop for all methods, with the loss and what follows an update as parameters
    methods   the catalogue: name, family, the function that applies it
    measuring accuracy, bytes of a really written file, seconds in turns with the teacher

Source: Hinton et al. 2015 (arXiv 1503.02531) for distillation; Gholami et al. 2021 (arXiv 2103.13630) for quantization;
Zhu and Gupta 2017 (arXiv 1710.01878), Frankle and Carbin 2019 (arXiv 1803.03635), Mishra et al. 2021 (arXiv 2104.08378)
for pruning.
"""
