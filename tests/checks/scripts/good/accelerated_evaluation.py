"""accelerate: metrics gathered on all ranks, and files written by the main process."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def evaluate(accelerator, model, loader):
    model.eval()
    found = []
    for x, y in loader:
        with torch.no_grad():
            guess = model(x).argmax(-1)
        guess, y = accelerator.gather_for_metrics((guess, y))
        found.append((guess == y).float().mean().item())
    return sum(found) / len(found)


def main():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    with accelerator.main_process_first():
        data = TensorDataset(torch.rand(64, 8), torch.randint(0, 2, (64,)))
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(3):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        score = evaluate(accelerator, model, loader)
        if accelerator.is_main_process:
            print(epoch, score)
            accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
        accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
