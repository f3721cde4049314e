"""Lightning: the trainer makes the group, hooks log, rank 0 alone writes a file."""

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader, TensorDataset


@rank_zero_only
def write(path, text):
    path.write_text(text)


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def training_step(self, batch, _):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        if self.trainer.is_global_zero:
            print(self.trainer.callback_metrics)
        self.trainer.strategy.barrier()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = L.Trainer(max_epochs=2, strategy="ddp", num_nodes=2)
module = Module()
trainer.fit(module, DataLoader(TensorDataset(torch.rand(64, 8)), batch_size=8, shuffle=True))
trainer.save_checkpoint("model.ckpt")
if trainer.is_global_zero:
    torch.save(module.net.state_dict(), "net.pt")
