"""Configurations of other programs (Megatron-LM, torchtitan, DeepSpeed, accelerate, axolotl, Trainer, …), read as data."""
