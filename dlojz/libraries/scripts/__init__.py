"""Predict scripts of others from their first step: recording, recognition, engine memory, or steps on fake tensors."""
