#!/usr/bin/env python3
"""The same mixture-of-experts model written plainly in PyTorch, as an oracle for Octavo.

usage: torch_oracle.py PATH_OF_interop_dump_model [DEVICE RECIPE]

For both families, with and without the auxiliary loss: lets the driver train 20 steps in FP32 on two
ranks (expert-parallel size 2), repeats them here from the same weights on the same batches with the
same microbatch split, and compares the losses: each within 1e-4.

With DEVICE (cpu, cuda) and RECIPE (bf16) the driver trains with one rank in that precision. It is
compared with the same FP32 oracle; BF16 keeps 8 bits, so the first loss is within 5e-3, every later
one within 0.05 (the CPU's largest: 0.018; orders of sums move it), gradient norms within 5 %.
"""
import os
import subprocess
import sys
import tempfile

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    print("skipped: this Python has no torch; Debian's package is python3-torch")
    sys.exit(77)

STEPS = 20
# Of a loss at the first step, of later ones; of a gradient norm, relative.
TOLERANCES = {"fp32": (1e-4, 1e-4, 1e-3), "bf16": (5e-3, 5e-2, 5e-2)}


def read_case(folder):
    config = {}
    with open(os.path.join(folder, "config.txt")) as lines:
        for line in lines:
            key, value = line.split()
            config[key] = float(value)
    flat = torch.frombuffer(bytearray(open(os.path.join(folder, "weights.bin"), "rb").read()),
                            dtype=torch.float32)
    weights = {}
    with open(os.path.join(folder, "weights.txt")) as lines:
        for line in lines:
            name, offset, *shape = line.split()
            shape = [int(d) for d in shape]
            count = 1
            for d in shape:
                count *= d
            part = flat[int(offset):int(offset) + count].clone().reshape(shape)
            weights[name] = part.requires_grad_(True)
    batches = torch.frombuffer(bytearray(open(os.path.join(folder, "batches.bin"), "rb").read()),
                               dtype=torch.int32)
    blocks = int(config["microbatches"] * config["ranks"])
    batches = batches.reshape(int(config["steps"]), blocks, 2, int(config["sequences"]),
                              int(config["sequence"])).long()
    with open(os.path.join(folder, "losses.txt")) as lines:
        losses = [tuple(float(v) for v in line.split()) for line in lines]
    return config, weights, batches, losses


def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x, theta):
    """x [B, S, heads, D]: pairs (i, i + D/2) turned by position * theta^(-2i/D)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequency
    cos, sin = angle.cos().float()[:, None, :], angle.sin().float()[:, None, :]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def attention(x, weights, prefix, c):
    batch, length, _ = x.shape
    heads, kv_heads, dim = int(c["heads"]), int(c["kv_heads"]), int(c["head_dim"])
    packed = F.linear(x, weights[prefix + "attn.qkv.weight"])
    q, k, v = packed.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    q = q.reshape(batch, length, heads, dim)
    k = k.reshape(batch, length, kv_heads, dim)
    v = v.reshape(batch, length, kv_heads, dim)
    if c["qk_norm"]:
        q = rms_norm(q, weights[prefix + "attn.q_norm.weight"], c["norm_eps"])
        k = rms_norm(k, weights[prefix + "attn.k_norm.weight"], c["norm_eps"])
    q, k = rotate(q, c["rope_theta"]), rotate(k, c["rope_theta"])
    k = k.repeat_interleave(heads // kv_heads, dim=2)
    v = v.repeat_interleave(heads // kv_heads, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / dim ** 0.5
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(mask, float("-inf")).softmax(-1), v)
    return F.linear(out.reshape(batch, length, heads * dim), weights[prefix + "attn.out.weight"])


def experts(x, weights, prefix, c):
    """Returns the layer's output and its auxiliary and z losses (one rank's microbatch)."""
    shape = x.shape
    x = x.reshape(-1, shape[-1])
    count, topk = int(c["experts"]), int(c["topk"])
    logits = F.linear(x, weights[prefix + "router.weight"])
    scores = logits.softmax(-1)
    top, index = scores.topk(topk, dim=-1)
    p = top / top.sum(-1, keepdim=True)
    fc1, fc2 = weights[prefix + "experts.fc1.weight"], weights[prefix + "experts.fc2.weight"]
    y = torch.zeros_like(x)
    for e in range(count):
        token, slot = (index == e).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], fc1[e]).chunk(2, dim=-1)
        out = F.linear(F.silu(gate) * up, fc2[e])
        y = y.index_add(0, token, out * p[token, slot, None])
    f = torch.bincount(index.flatten(), minlength=count).float() / index.numel()
    aux = c["aux"] * count * (f * scores.mean(0)).sum()
    z = c["z"] * torch.logsumexp(logits, -1).pow(2).mean()
    return y.reshape(shape), aux, z


def forward(tokens, targets, weights, c):
    x = weights["embedding.weight"][tokens]
    aux = z = 0
    for layer in range(int(c["layers"])):
        prefix = "layers.%d." % layer
        normed = rms_norm(x, weights[prefix + "attn_norm.weight"], c["norm_eps"])
        x = x + attention(normed, weights, prefix, c)
        normed = rms_norm(x, weights[prefix + "mlp_norm.weight"], c["norm_eps"])
        y, layer_aux, layer_z = experts(normed, weights, prefix, c)
        x, aux, z = x + y, aux + layer_aux, z + layer_z
    logits = F.linear(rms_norm(x, weights["final_norm.weight"], c["norm_eps"]),
                      weights["lm_head.weight"])
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), aux, z


def compare(driver, family, aux, device, recipe):
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([driver, folder, family, str(aux), str(STEPS), device, recipe], check=True)
        c, weights, batches, reference = read_case(folder)
    assert len(reference) == STEPS, "the driver wrote %d losses" % len(reference)
    matrices = [w for w in weights.values() if w.dim() > 1]
    vectors = [w for w in weights.values() if w.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1},
                                   {"params": vectors, "weight_decay": 0.0}],
                                  lr=c["lr"], betas=(0.9, 0.95), eps=1e-8)
    blocks = batches.shape[1]
    tokens_total = batches.shape[1] * batches.shape[3] * batches.shape[4]
    worst = 0.0
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_sum, aux_sum = 0.0, 0.0
        for block in range(blocks):
            loss, aux_loss, z_loss = forward(batches[step, block, 0], batches[step, block, 1],
                                             weights, c)
            (loss / tokens_total + (aux_loss + z_loss) / blocks).backward()
            loss_sum += loss.item() / tokens_total
            aux_sum += float(aux_loss) / blocks
        norm = torch.nn.utils.clip_grad_norm_(list(weights.values()), 1.0).item()
        optimizer.step()
        ours_loss, ours_aux, ours_norm = reference[step]
        first, later, relative = TOLERANCES[recipe]
        limit = first if step == 0 else later
        for name, ours, theirs, limit in (("loss", ours_loss, loss_sum, limit),
                                          ("auxiliary loss", ours_aux, aux_sum, limit),
                                          ("gradient norm", ours_norm, norm, relative * norm)):
            if not abs(ours - theirs) <= limit:
                print("%s, aux %g, step %d: %s is %.7f, torch has %.7f"
                      % (family, aux, step, name, ours, theirs))
                return False
        worst = max(worst, abs(ours_loss - loss_sum))
    print("%s %s, %-10s aux %-5g: %d steps, loss %.4f to %.4f, largest difference %.1e"
          % (device, recipe, family, aux, STEPS, reference[0][0], reference[-1][0], worst))
    return True


def main():
    if len(sys.argv) not in (2, 4) or (len(sys.argv) == 4 and sys.argv[3] not in TOLERANCES):
        print(__doc__)
        return 2
    device, recipe = sys.argv[2:] if len(sys.argv) == 4 else ("cpu", "fp32")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ok = True
    for family in ("mixtral", "qwen3_moe"):
        for aux in (0.0, 0.02):
            ok = compare(sys.argv[1], family, aux, device, recipe) and ok
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
