"""Room of the training script that grows from lab to lab."""
