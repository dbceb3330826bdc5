"""LoRA adapters by request: what lies in a checkpoint, which of them are on the device, and how a step uses them."""
