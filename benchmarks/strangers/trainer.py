"""The Hugging Face Trainer with its defaults on a small LLaMA; the last batch of an epoch is smaller."""

import no_torchvision_kernels  # noqa: F401
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


class CountingTrainer(Trainer):
    samples = 0

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.samples += len(inputs["input_ids"])
        return super().compute_loss(model, inputs, *args, **kwargs)


class Printer(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        self.samples, trainer.samples = trainer.samples, 0
        if not state.is_world_process_zero:
            print(f"step {state.global_step - 1} samples {self.samples}", flush=True)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs and state.is_world_process_zero:
            tokens = 32 * self.samples
            print(f"step {state.global_step - 1} loss {float(logs['loss']):.6f} samples {self.samples}", flush=True)
            print(f"check tokens {tokens}", flush=True)


torch.manual_seed(0)
config = LlamaConfig(vocab_size=500, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 500, (50, 32))]
settings = TrainingArguments(
    "out",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_train_epochs=2,
    use_cpu=True,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = CountingTrainer(LlamaForCausalLM(config), settings, train_dataset=rows, callbacks=[Printer()])
trainer.train()
print(f"check wrapped in {type(trainer.model_wrapped).__name__}", flush=True)
