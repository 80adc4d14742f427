# ruff: noqa
# fmt: off
"""40 losses written from the specification of klamp.check alone: 20 sound, 20 faulty. float32 everywhere."""
import copy
import torch
import torch.nn as nn
import torch.nn.functional as F

LOSSES = []


def case(sound, fault="", names="", means="reverse"):
    """names: regular expression that a code of a wrong finding or the kl class must match (faulty only)."""
    def deco(f):
        LOSSES.append(dict(name=f.__name__, sound=sound, fault=fault, names=names, means=means, make=f))
        return f
    return deco


# ----------------------------------------------------------------------------- worlds
class W:
    pass


def gather(logits, ids):
    return torch.log_softmax(logits, -1).gather(-1, ids[..., None])[..., 0]


def advs(r, g, how="z"):
    x = r.view(-1, g)
    if how == "z":
        a = (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-4)
    elif how == "mean":
        a = x - x.mean(1, keepdim=True)
    elif how == "loo":
        a = x - (x.sum(1, keepdim=True) - x) / (g - 1)
    return a.reshape(-1)


def drawn(seed, B=8, T=20, V=48, lag=0.0, drift=0.3, minlen=5, G=4, scale=1.5, how="z"):
    """Log-probabilities from drawn logits; tokens drawn from the old policy (= the policy when lag is 0)."""
    g = torch.Generator().manual_seed(seed)
    w = W()
    base = scale * torch.randn(B, T, V, generator=g)
    w.logits = (base + lag * torch.randn(B, T, V, generator=g)).requires_grad_()
    w.old_logits = base
    w.ref_logits = base + drift * torch.randn(B, T, V, generator=g)
    w.ids = torch.multinomial(base.softmax(-1).view(-1, V), 1, generator=g).view(B, T)
    w.len = torch.randint(minlen, T + 1, (B,), generator=g)
    w.len[0] = T
    w.mask = torch.arange(T)[None] < w.len[:, None]
    w.logp = gather(w.logits, w.ids)
    w.old = gather(w.old_logits, w.ids)
    w.ref = gather(w.ref_logits, w.ids)
    w.r = torch.rand(B, generator=g) + (torch.rand(B, generator=g) > 0.5).float()
    w.adv = advs(w.r, G, how)
    w.g = g
    return w


class LM(nn.Module):
    """A tiny causal language model."""

    def __init__(self, V=40, d=32):
        super().__init__()
        self.emb = nn.Embedding(V, d)
        self.rnn = nn.GRU(d, d, batch_first=True)
        self.head = nn.Linear(d, V)
        self.value = nn.Linear(d, 1)

    def forward(self, ids):
        h = self.rnn(self.emb(ids))[0]
        return self.head(h) * 4, h


def moved(model, size, g):
    m = copy.deepcopy(model)
    with torch.no_grad():
        for p in m.parameters():
            p.add_(size * torch.randn(p.shape, generator=g))
    return m


PAD, EOS = 0, 2


def real(seed, B=8, P=3, T=16, V=40, lag=0.0, drift=0.06, G=4, how="z"):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    w = W()
    w.old_model = LM(V)
    with torch.no_grad():
        w.old_model.head.bias[EOS] += 0.3
        w.old_model.head.bias[PAD] -= 3
    w.model = moved(w.old_model, lag, g) if lag else copy.deepcopy(w.old_model)
    w.ref_model = moved(w.old_model, drift, g)
    full = torch.randint(3, V, (B // G, P), generator=g).repeat_interleave(G, 0)
    done = torch.zeros(B, dtype=torch.bool)
    with torch.no_grad():
        for _ in range(T):
            p = w.old_model(full)[0][:, -1].softmax(-1)
            t = torch.multinomial(p, 1, generator=g)[:, 0]
            t = torch.where(done, torch.full_like(t, PAD), t)
            full = torch.cat([full, t[:, None]], 1)
            done |= t == EOS
    w.full, w.P = full, P
    w.ids = full[:, P:]
    ended = (w.ids == EOS).int().cumsum(1) - (w.ids == EOS).int()
    w.mask = ended == 0
    lg, h = w.model(full)
    w.hidden = h[:, P - 1:-1]
    w.logits = lg[:, P - 1:-1]
    with torch.no_grad():
        w.old_logits = w.old_model(full)[0][:, P - 1:-1]
        w.ref_logits = w.ref_model(full)[0][:, P - 1:-1]
    w.logp = gather(w.logits, w.ids)
    w.old, w.ref = gather(w.old_logits, w.ids), gather(w.ref_logits, w.ids)
    w.r = torch.rand(B, generator=g) + (torch.rand(B, generator=g) > 0.5).float()
    w.adv = advs(w.r, G, how)
    w.g = g
    return w


def mmean(x, mask):
    return (x * mask).sum() / mask.sum()


def clipped(logp, old, adv, lo=0.2, hi=0.2):
    ratio = torch.exp(logp - old)
    return -torch.min(ratio * adv, ratio.clamp(1 - lo, 1 + hi) * adv)


# ----------------------------------------------------------------------------- sound: log-probabilities
@case(True)
def s01_grpo_ppoclip_live_ratio_times_k3_token_mean():
    w = real(1, lag=0.02)
    a = w.adv[:, None]
    loss = clipped(w.logp, w.old, a)
    d = w.ref - w.logp
    kl = torch.exp(d) - d - 1
    kl = kl * torch.exp(w.logp - w.old)          # TRL use_bias_correction_kl
    loss = ((loss + 0.04 * kl) * w.mask).sum() / w.mask.sum().clamp(min=1.0)
    return loss, dict(policy_logprobs=w.logp, mask=w.mask, ref_logprobs=w.ref, old_logprobs=w.old, advantages=w.adv, beta=0.04)


@case(True, means="forward")
def s02_deepseekmath_k3_forward_meant_sequence_mean():
    w = drawn(2, B=6, T=24, lag=0.08, G=3)
    loss = 0.0
    lr = w.ref - w.logp
    tok = clipped(w.logp, w.old, w.adv[:, None]) + 0.05 * (lr.exp() - lr - 1)
    loss = ((tok * w.mask).sum(-1) / w.mask.sum(-1)).mean()
    return loss, dict(policy_logprobs=w.logp, mask=w.mask, ref_logprobs=w.ref, old_logprobs=w.old, advantages=w.adv, beta=0.05, means="forward")


@case(True)
def s03_python_loop_reinforce_k2_accumulated():
    w = drawn(3, B=8, T=15, V=30, how="mean")
    total = torch.zeros(())
    n = 0
    for b in range(8):
        pg, kl = 0.0, 0.0
        L = int(w.len[b])
        for t in range(L):
            lp = w.logp[b, t]
            pg = pg - w.adv[b] * lp
            kl = kl + 0.5 * (lp - w.ref[b, t]) ** 2
        total = total + (pg + 0.1 * kl) / L
        n += 1
    loss = total / n / 4                          # 4 micro-batches are accumulated
    return loss, dict(policy_logprobs=w.logp, mask=w.mask, ref_logprobs=w.ref, advantages=w.adv, beta=0.1)


@case(True)
def s04_reinforce_pp_token_kl_in_reward_to_go_whitened():
    w = drawn(4, B=8, T=18)
    beta = 0.03
    m = w.mask.float()
    tr = -beta * (w.logp.detach() - w.ref) * m
    tr[torch.arange(8), w.len - 1] += w.r
    ret = tr.flip(1).cumsum(1).flip(1) * m
    mean = (ret * m).sum() / m.sum()
    var = ((ret - mean) ** 2 * m).sum() / m.sum()
    adv = (ret - mean) * torch.rsqrt(var + 1e-8) * m
    old = w.logp.detach()
    loss = mmean(clipped(w.logp, old, adv), m)
    return loss, dict(policy_logprobs=w.logp, mask=w.mask, ref_logprobs=w.ref, old_logprobs=old, advantages=adv, rewards=w.r, beta=beta, kl_in="reward")


@case(True)
def s05_rloo_sequence_kl_in_reward():
    w = real(5, B=8, T=12, G=4)
    beta = 0.05
    seq = (w.logp * w.mask).sum(1)
    kl = ((w.logp.detach() - w.ref) * w.mask).sum(1)
    r = w.r - beta * kl
    adv = advs(r, 4, "loo")
    loss = (-adv * seq).mean()
    return loss, dict(policy_logprobs=w.logp, mask=w.mask, ref_logprobs=w.ref, advantages=adv, rewards=w.r, beta=beta, group_size=4)


@case(True)
def s06_tinker_centred_kl_in_advantage_importance_sampling():
    w = drawn(6, B=8, T=20, how="mean")
    logp = w.logp.detach().clone().requires_grad_()   # a fresh leaf
    sampled = w.old
    m = w.mask.float()
    diff = (sampled - w.ref) * m
    avg = diff.sum() / m.sum()
    a = w.adv[:, None] + 0.1 * m * (avg - diff)
    loss = -(torch.exp(logp - sampled) * a * m).sum()
    return loss, dict(policy_logprobs=logp, mask=w.mask, ref_logprobs=w.ref, old_logprobs=sampled, advantages=w.adv, beta=0.1, baseline=avg)


@case(True)
def s07_cispo_detached_ratio_k2_global_token_count():
    w = drawn(7, B=12, T=16, lag=0.1)
    ratio = torch.exp(w.logp - w.old)
    pg = -ratio.clamp(max=1.28).detach() * w.adv[:, None] * w.logp
    kl = 0.5 * (w.logp - w.ref).square() * ratio.detach()
    loss = ((pg + 0.02 * kl) * w.mask).sum() / 1031.0     # tokens of the whole global batch
    return loss, dict(policy_logprobs=w.logp, mask=w.mask, ref_logprobs=w.ref, old_logprobs=w.old, advantages=w.adv, beta=0.02)


@case(True)
def s08_gspo_sequence_ratio_with_weighted_k2():
    w = drawn(8, B=8, T=22, lag=0.05)
    m = w.mask.float()
    lr = w.logp - w.old
    seq = (lr * m).sum(1) / m.sum(1)
    s = torch.exp(w.logp - w.logp.detach() + seq.detach()[:, None])
    a = w.adv[:, None]
    pg = torch.max(-a * s, -a * s.clamp(1 - 3e-3, 1 + 4e-3))
    kl = lr.detach().exp() * 0.5 * (w.logp - w.ref) ** 2
    loss = (((pg + 0.05 * kl) * m).sum(1) / m.sum(1)).mean()
    return loss, dict(policy_logprobs=w.logp, mask=w.mask, ref_logprobs=w.ref, old_logprobs=w.old, advantages=w.adv, beta=0.05, clip=(3e-3, 4e-3))


@case(True)
def s09_dr_grpo_watched_live_ratio_times_k1():
    import klamp
    w = real(9, B=8, T=16, lag=0.02, how="mean")
    v = klamp.watch(ref_logprobs=w.ref, advantages=w.adv)
    ratio = (w.logp - w.old).exp()
    tok = -ratio * v.advantages[:, None] + 0.06 * ratio * (w.logp - v.ref_logprobs)
    loss = (tok * w.mask).sum() / (8 * 16)
    return loss, dict(policy_logprobs=w.logp, mask=w.mask, ref_logprobs=w.ref, old_logprobs=w.old, advantages=w.adv, beta=0.06, watched=v)


@case(True)
def s10_reinforce_score_function_kl_shaped_reward_per_token():
    w = real(10, B=12, T=14, G=6)
    shaped = w.adv[:, None] - 0.08 * (w.logp - w.ref).detach()
    loss = -(shaped * w.logp)[w.mask].mean()
    return loss, dict(policy_logprobs=w.logp, mask=w.mask, ref_logprobs=w.ref, advantages=w.adv, beta=0.08)


@case(True)
def s11_ppo_exact_full_vocabulary_kl():
    w = real(11, B=8, T=14, lag=0.015)
    pg = mmean(clipped(w.logp, w.old, w.adv[:, None]), w.mask)
    p = w.logits.log_softmax(-1)
    q = w.ref_logits.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    loss = pg + 0.05 * mmean(kl, w.mask)
    return loss, dict(policy_logprobs=w.logp, mask=w.mask, ref_logprobs=w.ref, old_logprobs=w.old, advantages=w.adv, beta=0.05, logits=w.logits, ref_logits=w.ref_logits, ids=w.ids)


@case(True)
def s12_ppo_gae_value_head_entropy_bonus_k2():
    w = real(12, B=6, T=16, G=3)
    m = w.mask.float()
    v = w.model.value(w.hidden.detach() * 1.0)[..., 0]
    val = v.detach() * m
    last = m.sum(1).long() - 1
    r = torch.zeros_like(val)
    r[torch.arange(6), last] = w.r
    adv = torch.zeros_like(val)
    run = torch.zeros(6)
    for t in reversed(range(16)):
        nxt = val[:, t + 1] if t < 15 else torch.zeros(6)
        run = (r[:, t] + nxt - val[:, t] + 0.95 * run) * m[:, t]
        adv[:, t] = run
    ret = adv + val
    mu = (adv * m).sum() / m.sum()
    sd = (((adv - mu) ** 2 * m).sum() / m.sum()).sqrt()
    adv = (adv - mu) / (sd + 1e-8) * m
    old = w.logp.detach()
    pg = mmean(clipped(w.logp, old, adv), m)
    lp = w.logits.log_softmax(-1)
    ent = mmean(-(lp.exp() * lp).sum(-1), m)
    vf = 0.5 * mmean((w.model.value(w.hidden)[..., 0] - ret) ** 2, m)
    kl = mmean(0.5 * (w.logp - w.ref) ** 2, m)
    loss = pg + 0.1 * vf - 0.01 * ent + 0.05 * kl
    return loss, dict(policy_logprobs=w.logp, mask=w.mask, ref_logprobs=w.ref, old_logprobs=old, advantages=adv, beta=0.05)


# ----------------------------------------------------------------------------- sound: distillation on logits
@case(True)
def s13_opd_logits_reverse_kl_sequence_mean():
    w = real(13, B=8, T=14)
    s = F.log_softmax(w.logits, -1)
    t = F.log_softmax(w.ref_logits, -1)
    per = (s.exp() * (s - t)).sum(-1)
    loss = ((per * w.mask).sum(1) / w.mask.sum(1)).mean()
    return loss, dict(logits=w.logits, teacher_logits=w.ref_logits, mask=w.mask, ids=w.ids)


@case(True)
def s14_logits_reverse_kl_div_two_sided_temperature_two():
    w = drawn(14, B=4, T=18, V=100, drift=0.8, G=2)
    T = 2.0
    s = F.log_softmax(w.logits[w.mask] / T, dim=-1)
    t = F.log_softmax(w.ref_logits[w.mask] / T, dim=-1)
    loss = F.kl_div(t, s, log_target=True, reduction="batchmean") * T * T     # KL(student||teacher)
    return loss, dict(logits=w.logits, teacher_logits=w.ref_logits, mask=w.mask, ids=w.ids, temperature=T)


@case(True, means="js")
def s15_gkd_generalised_jsd_half():
    w = drawn(15, B=5, T=12, V=64, drift=0.7, G=5)
    b = torch.tensor(0.5)
    s = F.log_softmax(w.logits, -1)
    t = F.log_softmax(w.ref_logits, -1)
    mix = torch.logsumexp(torch.stack([s + torch.log(1 - b), t + torch.log(b)]), 0)
    kt = F.kl_div(mix, t, reduction="none", log_target=True)
    ks = F.kl_div(mix, s, reduction="none", log_target=True)
    jsd = (b * kt + (1 - b) * ks)[w.mask]
    loss = jsd.sum() / w.mask.sum()
    return loss, dict(logits=w.logits, teacher_logits=w.ref_logits, mask=w.mask, ids=w.ids, means="js")


@case(True, means="forward")
def s16_hinton_soft_cross_entropy_forward_meant():
    w = drawn(16, B=4, T=20, V=32, drift=1.0, G=2)
    q = w.ref_logits.softmax(-1)
    ce = F.cross_entropy(w.logits.flatten(0, 1), q.flatten(0, 1), reduction="none").view(4, 20)
    loss = mmean(ce, w.mask)
    return loss, dict(logits=w.logits, teacher_logits=w.ref_logits, mask=w.mask, ids=w.ids, means="forward")


@case(True)
def s17_student_top_k_with_tail_bucket_reverse():
    w = drawn(17, B=4, T=16, V=128, drift=0.6, G=2)
    s = w.logits.log_softmax(-1)
    t = w.ref_logits.log_softmax(-1)
    idx = w.logits.detach().topk(12, -1).indices
    sh, th = s.gather(-1, idx), t.gather(-1, idx)
    stail = torch.log1p(-sh.exp().sum(-1, keepdim=True))
    ttail = torch.log1p(-th.exp().sum(-1, keepdim=True))
    sa, ta = torch.cat([sh, stail], -1), torch.cat([th, ttail], -1)
    loss = mmean((sa.exp() * (sa - ta)).sum(-1), w.mask)
    return loss, dict(logits=w.logits, teacher_logits=w.ref_logits, mask=w.mask, ids=w.ids)


# ----------------------------------------------------------------------------- sound: other shapes
@case(True)
def s18_opd_sampled_tokens_list_of_1d_tensors():
    w = drawn(18, B=7, T=20, drift=0.5, G=7)
    lps = [w.logp[b, : w.len[b]].detach().clone().requires_grad_() for b in range(7)]
    tea = [w.ref[b, : w.len[b]] for b in range(7)]
    old = [x.detach() for x in lps]
    ms = [torch.arange(len(x)) >= 2 for x in lps]         # the first two places are the prompt's
    num, den = 0.0, 0
    for lp, t, o, m in zip(lps, tea, old, ms):
        a = -(o - t)
        num = num - (torch.exp(lp - o) * a * m).sum()
        den += int(m.sum())
    loss = num / den
    return loss, dict(policy_logprobs=lps, mask=ms, ref_logprobs=tea, old_logprobs=old)


@case(True)
def s19_packed_row_segments_sequence_mean_k2():
    w = drawn(19, B=8, T=14, how="mean")
    seg = torch.arange(8)[:, None].expand(8, 14)[w.mask][None]
    logp = w.logp[w.mask][None]
    ref = w.ref[w.mask][None]
    a = w.adv[seg[0]][None]
    m = torch.ones_like(logp, dtype=torch.bool)
    tok = -torch.exp(logp - logp.detach()) * a + 0.1 * 0.5 * (logp - ref).pow(2)
    per = torch.zeros(8).index_add(0, seg[0], tok[0]) / torch.bincount(seg[0], minlength=8)
    loss = per.mean()
    return loss, dict(policy_logprobs=logp, mask=m, ref_logprobs=ref, advantages=a, beta=0.1, segments=seg)


@case(True)
def s20_dapo_clip_higher_no_kl_truncated_sampler_weight():
    w = drawn(20, B=8, T=20, lag=0.15)
    sampler = w.old + 0.2 * torch.randn(w.old.shape, generator=w.g)
    sampler = sampler.clamp(max=-1e-4)
    tis = torch.exp(w.old - sampler).clamp(max=2.0)
    loss = mmean(clipped(w.logp, w.old, w.adv[:, None], 0.2, 0.28) * tis, w.mask)
    return loss, dict(policy_logprobs=w.logp, mask=w.mask, ref_logprobs=w.ref, old_logprobs=w.old, sampler_logprobs=sampler, advantages=w.adv, beta=0.0, clip=(0.2, 0.28))


# ----------------------------------------------------------------------------- faulty: log-probabilities
@case(False, "policy term reversed", r"polic")
def f01_ratio_upside_down():
    w = drawn(31, B=8, T=18, lag=0.05)
    ratio = torch.exp(w.old - w.logp)             # the wrong way round
    a = w.adv[:, None]
    pg = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a)
    kl = 0.5 * (w.logp - w.ref) ** 2
    loss = mmean(pg + 0.05 * kl, w.mask)
    return loss, dict(policy_logprobs=w.logp, mask=w.mask, ref_logprobs=w.ref, old_logprobs=w.old, advantages=w.adv, beta=0.05)


@case(False, "policy term absent although advantages were passed", r"polic")
def f02_ratio_under_no_grad():
    w = real(32, B=8, T=14, lag=0.02, how="mean")
    with torch.no_grad():
        ratio = torch.exp(w.logp - w.old)
    pg = -torch.min(ratio * w.adv[:, None], ratio.clamp(0.8, 1.2) * w.adv[:, None])
    kl = ratio * 0.5 * (w.logp - w.ref).square()
    loss = mmean(pg, w.mask) + 0.05 * mmean(kl, w.mask)
    return loss, dict(policy_logprobs=w.logp, mask=w.mask, ref_logprobs=w.ref, old_logprobs=w.old, advantages=w.adv, beta=0.05)


@case(False, "KL's gradient zero on average", r"zero")
def f03_k1_as_loss_list_of_tensors():
    w = drawn(33, B=8, T=20, how="mean")
    lps = [w.logp[b, : w.len[b]].detach().clone().requires_grad_() for b in range(8)]
    refs = [w.ref[b, : w.len[b]] for b in range(8)]
    n = sum(len(x) for x in lps)
    pg = sum(-(w.adv[b] * lps[b]).sum() for b in range(8)) / n
    kl = sum((lp - r).sum() for lp, r in zip(lps, refs)) / n
    loss = pg + 0.04 * kl
    ms = [torch.ones(len(x), dtype=torch.bool) for x in lps]
    return loss, dict(policy_logprobs=lps, mask=ms, ref_logprobs=refs, advantages=w.adv, beta=0.04)


@case(False, "KL pushes away from the reference", r"away")
def f04_kl_added_to_the_advantage():
    w = real(34, B=8, T=16)
    old = w.logp.detach()
    a = w.adv[:, None] + 0.1 * (old - w.ref)      # should be minus
    loss = -(torch.exp(w.logp - old) * a * w.mask).sum() / w.mask.sum()
    return loss, dict(policy_logprobs=w.logp, mask=w.mask, ref_logprobs=w.ref, old_logprobs=old, advantages=w.adv, beta=0.1)


@case(False, "swapped: exp(delta) - 1", r"swap")
def f05_k3_with_the_log_ratio_swapped_sequence_mean():
    w = drawn(35, B=9, T=16, lag=0.06, G=3)
    lr = w.logp - w.ref                           # k3 needs ref - logp
    kl = torch.expm1(lr) - lr
    tok = clipped(w.logp, w.old, w.adv[:, None]) + 0.05 * kl
    loss = ((tok * w.mask).sum(1) / w.mask.sum(1)).mean()
    return loss, dict(policy_logprobs=w.logp, mask=w.mask, ref_logprobs=w.ref, old_logprobs=w.old, advantages=w.adv, beta=0.05)


@case(False, "sign only", r"sign")
def f06_l1_loss_against_the_reference_dr_grpo():
    w = drawn(36, B=8, T=18, how="mean")
    kl = F.l1_loss(w.logp, w.ref, reduction="none")
    pg = -w.adv[:, None] * torch.exp(w.logp - w.logp.detach())
    loss = ((pg + 0.03 * kl) * w.mask).sum() / (8 * 64)
    return loss, dict(policy_logprobs=w.logp, mask=w.mask, ref_logprobs=w.ref, advantages=w.adv, beta=0.03)


@case(False, "step only", r"step")
def f07_relu_of_the_log_ratio():
    w = real(37, B=8, T=16, how="loo")
    kl = F.relu(w.logp - w.ref)                   # "a KL cannot be negative"
    loss = mmean(-w.adv[:, None] * w.logp + 0.1 * kl, w.mask)
    return loss, dict(policy_logprobs=w.logp, mask=w.mask, ref_logprobs=w.ref, advantages=w.adv, beta=0.1)


@case(False, "KL detached although beta was passed", r"detach|absent|no.?kl|none|missing")
def f08_detached_k3_watched():
    import klamp
    w = real(38, B=8, T=16, lag=0.02)
    v = klamp.watch(ref_logprobs=w.ref, advantages=w.adv)
    with torch.no_grad():
        d = v.ref_logprobs - w.logp
        kl = d.exp() - d - 1
    pg = clipped(w.logp, w.old, v.advantages[:, None])
    loss = mmean(pg + 0.04 * kl, w.mask)
    return loss, dict(policy_logprobs=w.logp, mask=w.mask, ref_logprobs=w.ref, old_logprobs=w.old, advantages=w.adv, beta=0.04, kl_in="loss", watched=v)


@case(False, "tokens outside the mask carry gradient (the KL's)", r"mask")
def f09_kl_not_masked():
    w = drawn(39, B=8, T=20)
    pg = -(torch.exp(w.logp - w.logp.detach()) * w.adv[:, None] * w.mask).sum() / w.mask.sum()
    kl = (0.5 * (w.logp - w.ref) ** 2).sum() / w.mask.sum()
    loss = pg + 0.05 * kl
    return loss, dict(policy_logprobs=w.logp, mask=w.mask, ref_logprobs=w.ref, advantages=w.adv, beta=0.05)


@case(False, "another beta than passed (a quarter)", r"beta")
def f10_kl_divided_by_accumulation_twice():
    w = drawn(40, B=8, T=16, lag=0.06)
    acc = 4
    ratio = torch.exp(w.logp - w.old)
    pg = mmean(clipped(w.logp, w.old, w.adv[:, None]), w.mask)
    kl = mmean(ratio.detach() * 0.5 * (w.logp - w.ref) ** 2, w.mask) / acc
    loss = (pg + 0.08 * kl) / acc
    return loss, dict(policy_logprobs=w.logp, mask=w.mask, ref_logprobs=w.ref, old_logprobs=w.old, advantages=w.adv, beta=0.08)


@case(False, "shift: the reference's values are one place off", r"shift")
def f11_reference_logits_not_shifted():
    w = real(41, B=8, T=16, lag=0.0)
    with torch.no_grad():
        # forgot the [:, :-1]: the logits *after* each token are gathered
        ref_full = w.ref_model(w.full)[0]
        ref = gather(ref_full[:, w.P:], w.ids)
    kl = 0.5 * (w.logp - ref).square()
    loss = mmean(-w.adv[:, None] * torch.exp(w.logp - w.logp.detach()) + 0.02 * kl, w.mask)
    return loss, dict(policy_logprobs=w.logp, mask=w.mask, ref_logprobs=ref, advantages=w.adv, beta=0.02, logits=w.logits, ref_logits=w.ref_logits, ids=w.ids)


@case(False, "values that are no log-probabilities", r"log.?prob|positive|not-log|normal")
def f12_raw_logits_gathered():
    w = drawn(42, B=6, T=16, G=3)
    x = w.logits.gather(-1, w.ids[..., None]).squeeze(-1)      # no log_softmax
    y = w.ref_logits.gather(-1, w.ids[..., None]).squeeze(-1)
    loss = mmean(-w.adv[:, None] * x + 0.05 * 0.5 * (x - y) ** 2, w.mask)
    return loss, dict(policy_logprobs=x, mask=w.mask, ref_logprobs=y, advantages=w.adv, beta=0.05)


@case(False, "padding or tokens after the end trained", r"pad|end|eos")
def f13_mask_runs_on_after_the_end():
    w = real(43, B=8, T=20)
    mask = torch.ones_like(w.mask)                # every place up to max_new_tokens
    tok = -w.adv[:, None] * torch.exp(w.logp - w.logp.detach()) + 0.05 * 0.5 * (w.logp - w.ref) ** 2
    loss = ((tok * mask).sum(1) / mask.sum(1)).mean()
    return loss, dict(policy_logprobs=w.logp, mask=mask, ref_logprobs=w.ref, advantages=w.adv, beta=0.05, ids=w.ids, pad=PAD, eos=EOS)


@case(False, "KL(ref||policy): k3 differentiated", r"forward")
def f14_loop_k3_cispo_summed_over_batch():
    w = drawn(44, B=8, T=18, lag=0.05)
    loss = 0.0
    for b in range(8):
        L = int(w.len[b])
        lp, ol, rf = w.logp[b, :L], w.old[b, :L], w.ref[b, :L]
        is_w = torch.exp(lp - ol).detach().clamp(0.0, 1.3)
        x = rf - lp
        loss = loss + (-is_w * w.adv[b] * lp + 0.06 * (torch.exp(x) - 1 - x)).sum()
    loss = loss / 8
    return loss, dict(policy_logprobs=w.logp, mask=w.mask, ref_logprobs=w.ref, old_logprobs=w.old, advantages=w.adv, beta=0.06)


# ----------------------------------------------------------------------------- faulty: distillation on logits
@case(False, "forward instead of reverse (logits)", r"forward")
def f15_kldivloss_batchmean_forward():
    w = real(45, B=8, T=14)
    kd = nn.KLDivLoss(reduction="batchmean")
    loss = kd(F.log_softmax(w.logits[w.mask], -1), F.softmax(w.ref_logits[w.mask], -1))
    return loss, dict(logits=w.logits, teacher_logits=w.ref_logits, mask=w.mask, ids=w.ids)


@case(False, "head without tail", r"tail|head")
def f16_student_top_k_sum_without_tail():
    w = drawn(46, B=4, T=18, V=128, drift=0.6, G=2)
    s = w.logits.log_softmax(-1)
    t = w.ref_logits.log_softmax(-1)
    val, idx = s.topk(10, dim=-1)
    per = (val.exp() * (val - t.gather(-1, idx))).sum(-1)
    loss = ((per * w.mask).sum(1) / w.mask.sum(1)).mean()
    return loss, dict(logits=w.logits, teacher_logits=w.ref_logits, mask=w.mask, ids=w.ids)


@case(False, "renormalised head", r"renorm|head")
def f17_teacher_top_k_renormalised():
    w = drawn(47, B=5, T=14, V=96, drift=0.6, G=5)
    idx = w.ref_logits.topk(16, -1).indices
    s = w.logits.gather(-1, idx).log_softmax(-1)
    t = w.ref_logits.gather(-1, idx).log_softmax(-1)
    loss = mmean((s.exp() * (s - t)).sum(-1), w.mask)
    return loss, dict(logits=w.logits, teacher_logits=w.ref_logits, mask=w.mask, ids=w.ids)


@case(False, "one-sided temperature", r"temp|sided")
def f18_only_the_student_is_divided_by_temperature():
    w = drawn(48, B=4, T=16, V=64, drift=0.6, G=2)
    T = 1.5
    s = (w.logits / T).log_softmax(-1)
    t = w.ref_logits.log_softmax(-1)              # forgot / T
    loss = T ** 2 * mmean((s.exp() * (s - t)).sum(-1), w.mask)
    return loss, dict(logits=w.logits, teacher_logits=w.ref_logits, mask=w.mask, ids=w.ids, temperature=T)


@case(False, "tokens outside the mask trained (logits)", r"mask")
def f19_reverse_kl_over_prompt_and_padding():
    w = real(49, B=6, T=18, G=3)
    s = w.logits.log_softmax(-1)
    t = w.ref_logits.log_softmax(-1)
    loss = (s.exp() * (s - t)).sum(-1).mean()
    return loss, dict(logits=w.logits, teacher_logits=w.ref_logits, mask=w.mask, ids=w.ids)


@case(False, "teacher absent", r"teacher|absent|none|cross|no.?kl")
def f20_alpha_zero_leaves_only_cross_entropy():
    w = drawn(50, B=4, T=18, V=48, drift=0.6, G=2)
    alpha = 0.0                                   # the default of the config
    s = w.logits.log_softmax(-1)
    t = w.ref_logits.log_softmax(-1)
    kd = mmean((s.exp() * (s - t)).sum(-1), w.mask)
    ce = F.cross_entropy(w.logits[w.mask], w.ids[w.mask])
    loss = alpha * kd + (1 - alpha) * ce
    return loss, dict(logits=w.logits, teacher_logits=w.ref_logits, mask=w.mask, ids=w.ids)
