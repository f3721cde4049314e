"""transformers' Trainer: all ranks train and evaluate, the main one writes."""

from pathlib import Path

from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


def main(train, test):
    args = TrainingArguments("out", per_device_train_batch_size=8)
    model = AutoModelForCausalLM.from_pretrained("tiny")
    trainer = Trainer(model=model, args=args, train_dataset=train, eval_dataset=test)
    with args.main_process_first(desc="tokenize"):
        train = train.map(len)
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        Path("out/metrics.txt").write_text(str(metrics))
    trainer.save_model()


if __name__ == "__main__":
    main(..., ...)
