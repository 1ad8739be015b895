# SPDX-License-Identifier: Apache-2.0
"""diffusers with private LoRA by flash_clip: the adapters of a denoiser's attention are the only parameters that train.

The noise and the time step of a sample are drawn for it alone, so that its gradient depends on no other sample.
"""

import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from peft import LoraConfig
from torch.utils.data import DataLoader, TensorDataset

import opacus_memprof


def main() -> None:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    blocks = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
    unet = UNet2DConditionModel(
        sample_size=8, block_out_channels=(32,), cross_attention_dim=16, attention_head_dim=8, **blocks
    )
    unet.requires_grad_(False)
    unet.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    unet.to(device).train()
    latents, prompts = torch.randn(64, 4, 8, 8), torch.randn(64, 6, 16)
    private, optimizer, loader = opacus_memprof.PrivacyEngine().make_private(
        module=unet,
        optimizer=torch.optim.AdamW([p for p in unet.parameters() if p.requires_grad], lr=1e-3),
        data_loader=DataLoader(TensorDataset(latents, prompts), batch_size=16),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode="flash_clip",
        noise_generator=torch.Generator(device).manual_seed(0),
    )
    scheduler = DDPMScheduler()
    for clean, prompt in loader:
        noise = torch.randn_like(clean)
        steps = torch.randint(scheduler.config.num_train_timesteps, (len(clean),))
        noisy = scheduler.add_noise(clean, noise, steps)
        predicted = private(noisy.to(device), steps.to(device), prompt.to(device)).sample
        loss = torch.nn.functional.mse_loss(predicted, noise.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
