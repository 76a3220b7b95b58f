"""An epoch of Ultralytics: a small detector on random images."""

import os
import sys
from pathlib import Path

import cv2
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.models.libraries import import_torchvision

import_torchvision()
folder = Path(sys.argv[1]).parent / "data"
os.environ.update(YOLO_OFFLINE="1", YOLO_CONFIG_DIR=str(folder))
from ultralytics import YOLO  # noqa: E402


def save(trainer):
    torch.save(trainer.model.state_dict(), sys.argv[1])
    sys.exit()  # it would validate by operators that torchvision compiles for one PyTorch only


for part in ("images", "labels"):
    (folder / part).mkdir(parents=True, exist_ok=True)
pixels = np.random.default_rng(0).integers(0, 255, (8, 64, 64, 3), dtype=np.uint8)
for index, image in enumerate(pixels):
    cv2.imwrite(str(folder / f"images/{index}.png"), image)
    (folder / f"labels/{index}.txt").write_text("0 0.5 0.5 0.4 0.4\n")
(folder / "data.yaml").write_text(f"path: {folder}\ntrain: images\nval: images\nnames: {{0: a}}\n")
model = YOLO("yolov8n.yaml")
model.add_callback("on_train_epoch_end", save)
model.train(
    data=str(folder / "data.yaml"), epochs=1, imgsz=64, batch=4, device="cpu", workers=0, plots=False, amp=False,
    seed=0, optimizer="SGD", project=str(folder), verbose=False,
)  # fmt: skip
