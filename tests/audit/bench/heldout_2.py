# ruff: noqa
# fmt: off
"""40 held-out losses, written from the specification of klamp.check alone, before klamp.check was run on any of them."""
import copy
import torch
import torch.nn.functional as F
from types import SimpleNamespace as NS

def lsm(x): return F.log_softmax(x, -1)
def pick(lg, ids): return lsm(lg).gather(-1, ids[..., None]).squeeze(-1)

def adv_of(B, G, g, form="z"):
    r = torch.randn(B, generator=g)
    rr = r.view(-1, G)
    a = rr - rr.mean(1, keepdim=True)
    if form == "z": a = a / (rr.std(1, keepdim=True) + 1e-4)
    if form == "loo": a = a * G / (G - 1)
    return r, a.reshape(-1)

def lengths(B, T, g, lo=None):
    L = torch.randint(lo or max(3, T // 3), T + 1, (B,), generator=g); L[0] = T
    return L, torch.arange(T)[None] < L[:, None]

def drawn(seed, B, T, G=4, d=0.3, lag=0.0, V=40, form="z"):
    """log-probabilities of a categorical; tokens drawn from the old policy (= policy if lag is 0)."""
    g = torch.Generator().manual_seed(seed)
    lg = 1.5 * torch.randn(B, T, V, generator=g)
    old_lg = lg + lag * torch.randn(B, T, V, generator=g)
    ref_lg = lg + d * torch.randn(B, T, V, generator=g)
    ids = torch.multinomial(old_lg.softmax(-1).view(-1, V), 1, generator=g).view(B, T)
    L, m = lengths(B, T, g)
    r, a = adv_of(B, G, g, form)
    return NS(lp=pick(lg, ids).detach().requires_grad_(), ref=pick(ref_lg, ids), old=pick(old_lg, ids), ids=ids,
              mask=m, m=m.float(), L=L, r=r, adv=a, A=a[:, None], g=g, lg=lg, ref_lg=ref_lg, B=B, T=T, N=m.sum())

def tiny(kind, V, seed):
    import transformers as tf
    torch.manual_seed(seed)
    if kind == "gpt2":
        m = tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=V, n_embd=32, n_layer=2, n_head=2, n_positions=96, initializer_range=.25,
                               resid_pdrop=0., embd_pdrop=0., attn_pdrop=0., bos_token_id=1, eos_token_id=2))
    elif kind == "llama":
        m = tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=V, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                               num_attention_heads=4, num_key_value_heads=2, initializer_range=.25, max_position_embeddings=96))
    else:
        m = tf.Qwen2ForCausalLM(tf.Qwen2Config(vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                               num_attention_heads=4, num_key_value_heads=4, initializer_range=.25, max_position_embeddings=96))
    return m.eval()

def noisy(m, s, g):
    m = copy.deepcopy(m)
    with torch.no_grad():
        for p in m.parameters(): p.add_(s * p.std().nan_to_num(0.1) * torch.randn(p.shape, generator=g))
    return m.requires_grad_(False)

def model(kind, seed, B, T, P=4, V=83, d=0.05, lag=0.0, G=4, form="z"):
    """a tiny transformer; completions sampled from the old policy; 0 = pad, 2 = end of text."""
    g = torch.Generator().manual_seed(seed)
    pol = tiny(kind, V, seed); ref = noisy(pol, d, g); old = noisy(pol, lag, g)
    seq = torch.randint(3, V, (B // G, P), generator=g).repeat_interleave(G, 0)
    with torch.no_grad():
        for _ in range(T):
            lg = old(seq).logits[:, -1].float(); lg[:, :3] = lg[:, :3] - 0.0
            nxt = torch.multinomial(lg.softmax(-1), 1, generator=g)
            nxt = torch.where(nxt < 3, nxt + 3, nxt)
            seq = torch.cat([seq, nxt], 1)
    L, mask = lengths(B, T, g)
    comp = seq[:, P:].clone()
    comp[torch.arange(B), L - 1] = 2
    comp[~mask] = 0
    seq = torch.cat([seq[:, :P], comp], 1)
    lg = pol(seq).logits[:, P - 1:-1]
    with torch.no_grad():
        rlg, olg = ref(seq).logits[:, P - 1:-1], old(seq).logits[:, P - 1:-1]
    r, a = adv_of(B, G, g, form)
    return NS(pol=pol, refm=ref, lg=lg, ref_lg=rlg, lp=pick(lg, comp), ref=pick(rlg, comp), old=pick(olg, comp), ids=comp, mask=mask,
              m=mask.float(), L=L, r=r, adv=a, A=a[:, None], g=g, B=B, T=T, N=mask.sum(), seq=seq)

def kw(w, beta, *names, **more):
    d = dict(policy_logprobs=w.lp, mask=w.mask, ref_logprobs=w.ref, advantages=w.adv, beta=beta)
    extra = dict(old=("old_logprobs", "old"), logits=("logits", "lg"), ref_logits=("ref_logits", "ref_lg"), ids=("ids", "ids"), rewards=("rewards", "r"))
    for n in names: d[extra[n][0]] = getattr(w, extra[n][1])
    return {**d, **more}

def k3(lp, ref): q = ref - lp; return q.exp() - q - 1
def tok(x, w): return (x * w.m).sum() / w.m.sum()
def seqm(x, w): return ((x * w.m).sum(1) / w.m.sum(1)).mean()
def clip(r, A, lo=.2, hi=.2): return -torch.minimum(r * A, r.clamp(1 - lo, 1 + hi) * A)

LOSSES = []
def add(sound, fault="", expect=(), means="reverse"):
    def deco(f):
        LOSSES.append(dict(name=f.__name__, sound=sound, fault=fault, expect=list(expect), means=means, make=f)); return f
    return deco

# ------------------------------------------------------------------ sound
@add(True)
def s01_gpt2_python_loop_grpo_live_ratio_k3():
    w = model("gpt2", 1, 8, 14); total = 0.
    for i in range(w.B):
        n = int(w.L[i]); acc = 0.
        for t in range(n):
            lp = w.lp[i, t]; ratio = torch.exp(lp - lp.detach()); q = w.ref[i, t] - lp
            acc = acc - ratio * w.adv[i] + 0.04 * ratio * (torch.exp(q) - q - 1)
        total = total + acc / n
    return total / w.B, kw(w, 0.04)

@add(True)
def s02_reinforce_k2_sum_over_batch():
    w = drawn(2, 6, 21, G=3, form="mean")
    loss = (-(w.A * w.lp) + 0.1 * 0.5 * (w.lp - w.ref).square()).masked_fill(~w.mask, 0.).sum() / w.B
    return loss, kw(w, 0.1)

@add(True)
def s03_rloo_sequence_kl_in_reward():
    w = drawn(3, 12, 10, G=4)
    klseq = ((w.lp.detach() - w.ref) * w.m).sum(1)
    s = (w.r - 0.05 * klseq).view(-1, 4)
    a = (s - (s.sum(1, keepdim=True) - s) / 3).reshape(-1)
    w.adv = a
    return -(a * (w.lp * w.m).sum(1)).mean(), kw(w, 0.05, "rewards", kl_in="reward", group_size=4)

@add(True)
def s04_ppo_k1_of_rollout_policy_in_advantage():
    w = drawn(4, 8, 30, lag=.05)
    a = w.A - 0.03 * (w.old - w.ref)
    return tok(clip(torch.exp(w.lp - w.old), a, .2, .28), w), kw(w, 0.03, "old", kl_in="advantage")

@add(True)
def s05_llama_reward_to_go_with_token_kl():
    w = model("llama", 5, 8, 16)
    rt = -0.05 * (w.lp.detach() - w.ref) * w.m
    rt[torch.arange(w.B), w.L - 1] += w.r
    rtg = rt.flip(1).cumsum(1).flip(1) * w.m
    a = (rtg - (rtg * w.m).sum() / w.N) * w.m
    w.adv = a
    return -tok(a * w.lp, w), kw(w, 0.05, "rewards", kl_in="reward")

@add(True)
def s06_cispo_detached_ratio_times_k2():
    w = drawn(6, 8, 25, lag=.1)
    rho = torch.exp(w.lp - w.old).detach()
    loss = -(rho.clamp(max=1.3) * w.A * w.lp) + 0.02 * rho * 0.5 * (w.lp - w.ref) ** 2
    return tok(loss, w), kw(w, 0.02, "old")

@add(True)
def s07_gspo_with_live_ratio_k3():
    w = drawn(7, 16, 18, lag=.04)
    lr = w.lp - w.old
    s = torch.exp((lr * w.m).sum(1) / w.m.sum(1))
    pg = -torch.min(s * w.adv, s.clamp(1 - 3e-2, 1 + 4e-2) * w.adv).mean()
    return pg + 0.05 * seqm(lr.exp() * k3(w.lp, w.ref), w), kw(w, 0.05, "old")

@add(True, means="forward")
def s08_drgrpo_fixed_length_k3_meant_forward():
    w = drawn(8, 8, 20, form="mean")
    per = clip(torch.exp(w.lp - w.lp.detach()), w.A) + 0.08 * k3(w.lp, w.ref)
    return (per * w.m).sum() / (w.B * 64), kw(w, 0.08, means="forward")

@add(True)
def s09_qwen_reinforce_exact_full_vocabulary_kl():
    w = model("qwen", 9, 8, 12)
    lp_all = lsm(w.lg); kl = (lp_all.exp() * (lp_all - lsm(w.ref_lg))).sum(-1)
    return tok(-w.A * w.lp + 0.05 * kl, w), kw(w, 0.05, "logits", "ref_logits", "ids")

@add(True)
def s10_spo_quadratic_surrogate_k2():
    w = drawn(10, 8, 24, lag=.1)
    r = torch.exp(w.lp - w.old)
    obj = r * w.A - w.A.abs() / (2 * 0.2) * (r - 1).square()
    return tok(-obj + 0.05 * r * k3(w.lp, w.ref), w), kw(w, 0.05, "old")

@add(True)
def s11_topr_tapered():
    w = drawn(11, 12, 15, G=6, lag=.08, form="mean")
    lr = ((w.lp - w.old) * w.m).sum(1)
    taper = torch.where(w.adv >= 0, torch.ones_like(lr), lr.detach().exp().clamp(0, 1))
    pg = -(taper * w.adv * (w.lp * w.m).sum(1)).sum() / w.N
    return pg + 0.05 * tok((w.lp - w.old).detach().exp() * (w.lp - w.ref).detach() * w.lp, w), kw(w, 0.05, "old")

@add(True)
def s12_llama_ppo_rollback():
    w = model("llama", 12, 8, 16, lag=.03); r = torch.exp(w.lp - w.old); e = .1; al = .3
    f = torch.where(r > 1 + e, -al * r + (1 + al) * (1 + e), torch.where(r < 1 - e, -al * r + (1 + al) * (1 - e), r))
    obj = torch.minimum(r * w.A, f * w.A)
    return seqm(-obj + 0.1 * r.detach() * (w.lp - w.ref).square() / 2, w), kw(w, 0.1, "old")

@add(True)
def s13_awr_exponential_weights_k2():
    w = drawn(13, 8, 20)
    wt = (w.A / 1.5).exp().clamp(max=20)
    return tok(-wt * w.lp + 0.05 * (w.lp - w.ref) ** 2 / 2, w), kw(w, 0.05)

@add(True)
def s14_kimi_squared_residual():
    w = drawn(14, 8, 12, form="mean"); tau = 0.1
    D = ((w.lp - w.ref) * w.m).sum(1)
    return ((w.adv - tau * D) ** 2).mean() / (2 * tau), kw(w, tau)

@add(True)
def s15_gmpo_geometric_mean():
    w = drawn(15, 8, 20, lag=.06); sg = w.A.sign(); lr = (w.lp - w.old) * sg
    lr = torch.minimum(lr, lr.clamp(-.4, .4)) * sg
    geo = ((lr * w.m).sum(1) / w.m.sum(1)).exp()
    return -(geo * w.adv).mean() + 0.03 * seqm((w.lp - w.old).exp() * k3(w.lp, w.ref), w), kw(w, 0.03, "old")

@add(True)
def s16_gpt2_on_policy_distillation_importance_sampling():
    w = model("gpt2", 16, 4, 24, d=.1)
    a = -(w.lp.detach() - w.ref)
    loss = -(torch.exp(w.lp - w.lp.detach()) * a * w.m).sum()
    k = kw(w, 1.0, kl_in="advantage"); k["advantages"] = torch.zeros(w.B)
    return loss, k

@add(True)
def s17_gpt2_logits_reverse_kl_both_temperatures():
    w = model("gpt2", 17, 4, 20, d=.15); T = 2.
    s, t = lsm(w.lg / T), lsm(w.ref_lg / T)
    loss = T * T * tok(F.kl_div(t, s, log_target=True, reduction="none").sum(-1), w)
    return loss, dict(logits=w.lg, teacher_logits=w.ref_lg, mask=w.mask, ids=w.ids, temperature=T)

@add(True)
def s18_logits_student_topk_with_tail_bucket():
    w = drawn(18, 4, 20, V=50); lg = w.lg.clone().requires_grad_()
    s, t = lsm(lg), lsm(w.ref_lg); ix = s.topk(8, -1).indices
    sh, th = s.gather(-1, ix), t.gather(-1, ix)
    st, tt = torch.log1p(-sh.exp().sum(-1)), torch.log1p(-th.exp().sum(-1))
    kl = (sh.exp() * (sh - th)).sum(-1) + st.exp() * (st - tt)
    return tok(kl, w), dict(logits=lg, teacher_logits=w.ref_lg, mask=w.mask, ids=w.ids)

@add(True)
def s19_qwen_ppo_entropy_bonus_live_ratio_k3():
    w = model("qwen", 19, 8, 15, lag=.02)
    p = lsm(w.lg); H = -(p.exp() * p).sum(-1); r = torch.exp(w.lp - w.old)
    return tok(clip(r, w.A, .2, .28) - 0.003 * H + 0.04 * r * k3(w.lp, w.ref), w), kw(w, 0.04, "old", "logits", "ref_logits", "ids")

@add(True)
def s20_top_entropy_quantile_on_policy_part():
    w = drawn(20, 8, 30)
    H = -(lsm(w.lg).exp() * lsm(w.lg)).sum(-1); thr = H[w.mask].quantile(.7)
    keep = (H >= thr).float()
    pg = -torch.exp(w.lp - w.lp.detach()) * w.A * keep
    return tok(pg + 0.05 * (w.lp - w.ref).square() / 2, w), kw(w, 0.05)

# ------------------------------------------------------------------ faulty
@add(False, "policy term reversed (baseline minus reward inside the loss)", ["policy", "revers"])
def f01_gpt2_baseline_minus_reward():
    w = model("gpt2", 21, 8, 14, form="mean")
    a = w.r.view(-1, 4).mean(1).repeat_interleave(4) - w.r
    lp_seq = [w.lp[i, : int(w.L[i])] for i in range(w.B)]
    pg = -sum(a[i] * lp_seq[i].sum() for i in range(w.B)) / w.N
    return pg + 0.05 * tok((w.lp - w.ref).square() / 2, w), kw(w, 0.05)

@add(False, "policy term absent (live log-probabilities overwritten by a cached, detached ratio)", ["policy", "absent"])
def f02_gspo_ratio_from_detached():
    w = drawn(22, 8, 20, lag=.05)
    with torch.no_grad(): s = (((w.lp - w.old) * w.m).sum(1) / w.m.sum(1)).exp()
    pg = -torch.min(s * w.adv, s.clamp(.97, 1.04) * w.adv).mean()
    return pg + 0.05 * seqm((w.lp - w.old).exp() * k3(w.lp, w.ref), w), kw(w, 0.05, "old")

@add(False, "KL zero on average (detached ratio times k1)", ["zero"])
def f03_detached_ratio_times_k1():
    w = drawn(23, 8, 24, lag=.05); r = torch.exp(w.lp - w.old)
    return tok(clip(r, w.A) + 0.05 * r.detach() * (w.lp - w.ref), w), kw(w, 0.05, "old")

@add(False, "KL away from the reference (sign lost when folded into the advantage)", ["away"])
def f04_llama_advantage_minus_ref_minus_policy():
    w = model("llama", 24, 8, 16)
    a = w.A - 0.06 * (w.ref - w.lp).detach()
    return seqm(-torch.exp(w.lp - w.lp.detach()) * a, w), kw(w, 0.06, kl_in="advantage")

@add(False, "KL swapped (k3 with the log-ratio upside down)", ["swapped"])
def f05_swapped_cispo():
    w = drawn(25, 12, 16); q = w.lp - w.ref
    return tok(-(w.A * w.lp) + 0.05 * (q.expm1() - q), w), kw(w, 0.05)

@add(False, "KL sign only (root of the square)", ["sign"])
def f06_rms_distance_as_kl():
    w = drawn(26, 8, 20)
    kl = torch.sqrt((w.lp - w.ref).pow(2) + 1e-12)
    return (((-w.A * w.lp + 0.03 * kl) * w.m).sum(1)).mean(), kw(w, 0.03)

@add(False, "KL step only (maximum with the reference)", ["step"])
def f07_maximum_with_ref():
    w = drawn(27, 8, 22, lag=0)
    kl = torch.maximum(w.lp, w.ref) - w.ref
    return tok(clip(torch.exp(w.lp - w.lp.detach()), w.A, .2, .3) + 0.05 * kl, w), kw(w, 0.05)

@add(False, "KL detached (.item() added to the loss)", ["none", "detach", "absent"])
def f08_gpt2_item_penalty():
    w = model("gpt2", 28, 8, 16)
    kl = k3(w.lp, w.ref)
    return seqm(-w.A * w.lp, w) + 0.1 * seqm(kl, w).item(), kw(w, 0.1, kl_in="loss")

@add(False, "tokens outside the mask (KL over tool outputs too)", ["mask", "off"])
def f09_kl_over_tool_tokens():
    w = drawn(29, 8, 32); att = w.m.clone()
    tool = (torch.arange(32)[None] % 11 >= 6)
    w.mask = w.mask & ~tool; w.m = w.mask.float()
    pg = tok(-w.A * w.lp, w)
    kl = (w.lp - w.ref).square() / 2 * att
    return pg + 0.05 * kl.sum() / att.sum(), kw(w, 0.05)

@add(False, "another beta (KL over a fixed length of 64, policy term over tokens)", ["beta"])
def f10_kl_divided_by_max_length():
    w = drawn(30, 8, 20)
    pg = tok(-w.A * w.lp, w)
    kl = ((w.lp - w.ref).square() / 2 * w.m).sum(1) / 64
    return pg + 0.1 * kl.mean(), kw(w, 0.1)

@add(False, "shift (labels shifted twice)", ["shift"])
def f11_llama_labels_shifted_twice():
    w = model("llama", 31, 8, 16)
    nxt = w.ids.roll(-1, 1)
    w.lp, w.ref = pick(w.lg, nxt), pick(w.ref_lg, nxt)
    return tok(-w.A * w.lp + 0.05 * (w.lp - w.ref).square() / 2, w), kw(w, 0.05, "logits", "ref_logits", "ids")

@add(False, "values that are no log-probabilities (the server's probabilities as ref_logprobs)", ["logprob", "log-prob", "not-log", "positive", "values"])
def f12_ref_is_probability():
    w = drawn(32, 8, 18)
    w.ref = w.ref.exp()
    return tok(-w.A * w.lp + 0.02 * (w.lp - w.ref).square() / 2, w), kw(w, 0.02)

@add(False, "tokens after the end trained (mask from max_new_tokens, not from eos)", ["end", "eos", "after"])
def f13_qwen_tokens_after_the_end():
    w = model("qwen", 33, 8, 18)
    junk = torch.randint(3, 83, w.ids.shape, generator=w.g)
    ids = torch.where(w.mask, w.ids, junk)
    seq = torch.cat([w.seq[:, :4], ids], 1)
    w.lg = w.pol(seq).logits[:, 3:-1]; w.lp = pick(w.lg, ids); w.ids = ids
    with torch.no_grad(): w.ref = pick(w.refm(seq).logits[:, 3:-1], ids)
    w.mask = torch.ones_like(w.mask); w.m = w.mask.float()
    return tok(-w.A * w.lp + 0.05 * (w.lp - w.ref).square() / 2, w), kw(w, 0.05, "ids", eos=2, pad=0)

@add(False, "KL(ref||policy) (low_var_kl, clamped, differentiated, in a micro-batch loop)", ["forward"])
def f14_gpt2_low_var_kl_micro_batches():
    w = model("gpt2", 34, 8, 20); total = 0.
    for sl in (slice(0, 4), slice(4, 8)):
        q = (w.ref[sl] - w.lp[sl]).clamp(-20, 20)
        kl = (q.exp() - q - 1).clamp(-10, 10)
        r = torch.exp(w.lp[sl] - w.lp[sl].detach())
        total = total + ((clip(r, w.A[sl], .2, .28) + 0.04 * kl) * w.m[sl]).sum() / w.N
    return total, kw(w, 0.04)

@add(False, "on logits: forward instead of reverse (soft-target cross-entropy)", ["forward"])
def f15_gpt2_soft_target_cross_entropy():
    w = model("gpt2", 35, 4, 18, d=.15)
    loss = F.cross_entropy(w.lg[w.mask], w.ref_lg[w.mask].softmax(-1))
    return loss, dict(logits=w.lg, teacher_logits=w.ref_lg, mask=w.mask, ids=w.ids)

@add(False, "on logits: head without tail", ["tail", "head"])
def f16_teacher_topk_no_tail():
    w = drawn(36, 4, 18, V=64); lg = w.lg.clone().requires_grad_()
    top = lsm(w.ref_lg).topk(10, -1); s = lsm(lg).gather(-1, top.indices)
    return seqm((s.exp() * (s - top.values)).sum(-1), w), dict(logits=lg, teacher_logits=w.ref_lg, mask=w.mask, ids=w.ids)

@add(False, "on logits: renormalised head", ["renorm", "head", "tail"])
def f17_llama_student_topk_renormalised():
    w = model("llama", 37, 4, 20, d=.15)
    ix = w.lg.detach().topk(12, -1).indices
    s, t = lsm(w.lg.gather(-1, ix)), lsm(w.ref_lg.gather(-1, ix))
    return tok((s.exp() * (s - t)).sum(-1), w), dict(logits=w.lg, teacher_logits=w.ref_lg, mask=w.mask, ids=w.ids)

@add(False, "on logits: temperature on one side only", ["temp"])
def f18_only_student_tempered():
    w = drawn(38, 6, 15, G=3, V=48); lg = w.lg.clone().requires_grad_(); T = 1.5
    s, t = lsm(lg / T), lsm(w.ref_lg)
    return T * T * tok((s.exp() * (s - t)).sum(-1), w), dict(logits=lg, teacher_logits=w.ref_lg, mask=w.mask, ids=w.ids, temperature=T)

@add(False, "on logits: off-mask (batchmean over padding)", ["mask", "off"])
def f19_qwen_batchmean_over_padding():
    w = model("qwen", 39, 4, 22, d=.15); V = w.lg.shape[-1]
    loss = F.kl_div(lsm(w.ref_lg).reshape(-1, V), lsm(w.lg).reshape(-1, V), log_target=True, reduction="batchmean")
    return loss, dict(logits=w.lg, teacher_logits=w.ref_lg, mask=w.mask, ids=w.ids)

@add(False, "on logits: teacher absent (p log p, the teacher's term forgotten)", ["teacher", "entropy", "absent"])
def f20_negative_entropy_only():
    w = drawn(40, 5, 20, G=5, V=48); lg = w.lg.clone().requires_grad_(); p = lg.softmax(-1)
    return tok((p * (p + 1e-9).log()).sum(-1), w), dict(logits=lg, teacher_logits=w.ref_lg, mask=w.mask, ids=w.ids)
