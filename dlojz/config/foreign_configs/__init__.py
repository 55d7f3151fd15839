"""Configurations of other programs (Megatron-LM, torchtitan, DeepSpeed, accelerate, axolotl, …), read as data."""
