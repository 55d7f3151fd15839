"""A LightningModule with accumulation and clipping; arguments: devices and strategy of the Trainer."""

import sys
import warnings

import no_torchvision_kernels  # noqa: F401 - before the library that imports torchvision

# isort: split
import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        self.losses, self.done = [], 0

    def training_step(self, batch, number):
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.net(inputs), targets)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, number):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def on_train_batch_end(self, outputs, batch, number):
        if self.trainer.global_step > self.done:
            mean, samples = sum(self.losses) / len(self.losses), len(self.losses) * len(batch[0])
            print(f"step {self.done} loss {mean:.6f} samples {samples}", flush=True)
            self.losses, self.done = [], self.trainer.global_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    lightning.seed_everything(0, verbose=False)
    data = TensorDataset(torch.randn(128, 64), torch.randint(0, 10, (128,)))
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=int(sys.argv[1]),
        strategy=sys.argv[2],
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), DataLoader(data, batch_size=8), DataLoader(data, batch_size=32))
