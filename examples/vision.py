"""An image classifier: nothing in offloading is about language models.

python examples/vision.py
"""

import tempfile

import torch
from transformers import Trainer, ViTConfig, ViTForImageClassification

from hf_offload import OffloadTrainingArguments

torch.manual_seed(0)
# Yours: AutoModelForImageClassification.from_pretrained("..."), and a data set of processed images.
model = ViTForImageClassification(
    ViTConfig(image_size=64, patch_size=8, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_labels=10)
)
data = [{"pixel_values": torch.randn(3, 64, 64), "labels": number % 10} for number in range(24)]

with tempfile.TemporaryDirectory() as output:
    arguments = OffloadTrainingArguments(
        output_dir=output,
        max_steps=3,
        per_device_train_batch_size=8,
        logging_steps=1,
        save_strategy="no",
        dataloader_pin_memory=torch.accelerator.is_available(),
        offload="ssd",
        offload_directory=output,  # yours: a folder on the SSD
    )
    Trainer(model, arguments, train_dataset=data).train()
