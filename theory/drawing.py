"""The figures, one function a part. They only draw: every number is computed by the part.

`numbers` and `curves` are what the part's `measure` returns; `plt` is matplotlib.pyplot.
"""

import io
import math

import torch

import utils


def save(draw, numbers, curves, path):
    """Draw and write a PNG without dates or versions: the same numbers give the same file."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from PIL import Image
    figure = draw(plt, numbers, curves)
    for axis in figure.axes:
        axis.title.set_fontsize(10)
    figure.tight_layout()
    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=100, metadata={"Software": None})
    plt.close(figure)
    Image.open(drawn).convert("RGB").quantize(128).save(small, format="png", optimize=True)
    utils.write_atomic(path, small.getvalue())
    print(f"  figure: {path}")


def draw_benefit(plt, numbers, curves):
    sweep, rhos, bounded = curves["sweep"], curves["rhos"], curves["bounded"]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4))
    left.plot(sweep, curves["mixing"], label="direct mixing, two policies")
    left.plot(sweep, curves["mixing_three"], "--", label="direct mixing, three policies")
    left.axhline(numbers["bds"], color="C2", label=r"BDS ($=v_*$)")
    left.axvline(numbers["rho_c"], color="k", lw=1, ls=":")
    left.text(numbers["rho_c"] - 0.02, 0.55, rf"$\rho_c={numbers['rho_c']:.3f}$", ha="right")
    left.set(title="finite class: threshold is tight", xlabel=r"$\rho$",
             ylabel=r"$\mathcal{L}_{\rm val}$", ylim=(0, 1.45))
    left.legend(loc="upper left", fontsize=8)
    for i, row in enumerate(bounded):
        middle.plot(rhos, row["mixing"] - row["v"], color=f"C{i}",
                    label=rf"$R={row['radius']:.0f}$")
        middle.plot([row["rho_c"]], [1e-4], "^", color=f"C{i}", clip_on=False)
    middle.plot(rhos, curves["limit"], "k--", lw=1, label=r"$R\to\infty$")
    middle.set(title=r"$\|W_{ov}\|_F\leq R$: mixing misses $v_*$ at every $\rho>0$",
               xlabel=r"$\rho$   ($\blacktriangle$: $\rho_c(R)$)",
               ylabel=r"$\mathcal{L}_{\rm val}(\tilde\theta)-v_*$", yscale="log", xscale="log",
               ylim=(1e-4, 60))
    middle.legend(fontsize=8)
    radii = [row["radius"] for row in bounded]
    right.plot(radii, [row["delta_val"] for row in bounded], "o-", label=r"$\Delta_{\rm val}(R)$")
    right.plot(radii, [row["delta_sft"] for row in bounded], "s-", label=r"$\Delta_{\rm sft}(R)$")
    right.plot(radii, [row["bds"] - row["v"] for row in bounded], "^-",
               label=r"BDS: $\mathcal{L}_{\rm val}(\theta^*)-v_*$")
    half = int((rhos - 0.5).abs().argmin())
    right.plot(radii, [float(row["mixing"][half]) - row["v"] for row in bounded], "d-",
               label=r"mixing, $\rho=0.5$: $\mathcal{L}_{\rm val}(\tilde\theta)-v_*$")
    right.set(title=r"both $\Delta$ grow with the bound", xlabel=r"$R$", xscale="log", yscale="log")
    right.set_xticks(radii, [f"{radius:.0f}" for radius in radii])
    right.minorticks_off()
    right.legend(fontsize=8)
    return figure


def draw_coverage(plt, numbers, curves):
    share = numbers["share"]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4))
    k, bds, mixing = curves["bds"][1:, 0], curves["bds"][1:], curves["mixing"][1:]
    left.semilogx(k, bds[:, 1], label="BDS")
    left.semilogx(k, mixing[:, 1], "--", label="direct mixing")
    left.axhline(1, color="k", lw=0.5)
    left.text(2, share - 0.05, rf"$|\mathcal{{U}}|/N={share:.3f}$", fontsize=9)
    left.set(title="weight on the useful set", xlabel=r"step $k$",
             ylabel=r"$\sum_{i\in\mathcal{U}}\sigma_i(\omega^k)$", ylim=(0.4, 1.03))
    left.legend(loc="center right", fontsize=9)
    middle.loglog(k, 1 - bds[:, 1], label="BDS")
    middle.loglog(k, 1 - mixing[:, 1], "--", label="direct mixing")
    middle.set(title=rf"weight on useless rows, about $k^{{{numbers['slope']:.2f}}}$",
               xlabel=r"step $k$", ylabel=r"$1-\sum_{i\in\mathcal{U}}\sigma_i(\omega^k)$")
    middle.legend(fontsize=9)
    right.loglog(k, bds[:, 2], label="BDS")
    right.loglog(k, mixing[:, 2], "--", label="direct mixing")
    right.set(title="validation loss", xlabel=r"step $k$",
              ylabel=r"$\mathcal{L}_{\rm val}(\theta^k)$")
    right.legend(fontsize=9)
    return figure


def draw_convergence(plt, _, curves):
    results = curves["results"]
    figure, ((a, b), (c, d)) = plt.subplots(2, 2, figsize=(12, 8.4))
    for i, (r, trace, _) in enumerate(results):
        keep = torch.unique(torch.logspace(0, math.log10(max(r["steps"], 2)), 200).long() - 1)
        label = rf"$\epsilon={r['epsilon']:g}$"
        a.loglog(trace.k[keep] + 1, trace.loss[keep], color=f"C{i}", label=label)
        a.plot([r["steps"]], [r["epsilon"]], "o", color=f"C{i}")
        d.loglog(trace.k[keep] + 1, trace.ratio[keep], color=f"C{i}", label=label)
    a.set(title=r"one run per $\epsilon$, $\gamma=\epsilon^{-1/2}$; dots: $\tau_\epsilon$",
          xlabel=r"step $k$ (from 1)", ylabel=r"$\mathcal{L}_\gamma(\omega^k,\theta^k)$")
    a.legend(fontsize=9)
    a.set_yticks([0.125, 0.25, 0.5, 1, 2, 4], ["0.125", "0.25", "0.5", "1", "2", "4"])
    a.minorticks_off()
    epsilons = [r["epsilon"] for r, _, _ in results]
    b.loglog(epsilons, [r["steps"] for r, _, _ in results], "o-", label=r"observed $\tau_\epsilon$")
    b.loglog(epsilons, [r["wished"] for r, _, _ in results], "s--",
             label=r"$\frac{L}{\mu}\log(\mathcal{L}_\gamma/\epsilon)$ at $S_\epsilon=0$"
                   "\n(the theorem's bound, were it applicable)")
    b.invert_xaxis()
    b.set(title="hitting time", xlabel=r"$\epsilon$", ylabel="steps")
    b.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
    b.minorticks_off()
    b.legend(fontsize=9)
    r, trace, smooth = results[-1]
    keep = torch.unique(torch.logspace(0, math.log10(r["steps"]), 200).long() - 1)
    k = trace.k[keep] + 1
    c.loglog(k, trace.L[keep], "C3", label=r"$L_k$")
    c.loglog(smooth[:, 0] + 1, smooth[:, 1], "C3--", label="measured gradient variation")
    c.loglog(k, trace.mu_seen[keep], "C0--",
             label=r"measured $\|\nabla\mathcal{L}_\gamma\|^2/2\mathcal{L}_\gamma$")
    c.loglog(k, trace.mu_tokens[keep], "C0:",
             label=r"$\sigma_{\min}^2(H^k)\,\min\|\nabla g\|^2/2g$")
    c.loglog(k, trace.mu_paper[keep], "C0", label=r"$\mu_{\rm PL}$")
    c.loglog(k, trace.sigma_min[keep], "C2", label=r"$\sigma_{\min}(H^k)$")
    c.set(title=rf"the constants hold, $\epsilon={r['epsilon']:g}$: "
                r"$\mu_{\rm PL}\leq$ measured, measured $\leq L_k$", xlabel=r"step $k$ (from 1)",
          ylim=(1e-15, 1e3))
    c.legend(fontsize=9, ncol=2, loc="lower left")
    d.axhline(1, color="k")
    d.axhline(r["floor"], color="k", ls="--")
    d.text(1.2, r["floor"] * 0.3, r"least over all instances: $16\,e\,V(N{+}N^\prime)D\,\log V$",
           fontsize=9)
    d.text(1.2, 1.6, "the condition asks for at most 1", fontsize=9)
    d.set(title=r"condition on the start: left side over $M_H(k_0)$, at every $k_0=k$",
          xlabel=r"$k$ (from 1)", ylim=(0.3, None))
    d.legend(fontsize=9, loc="upper left")
    return figure


def draw_equivalence(plt, _, curves):
    figure, (left, *others) = plt.subplots(1, 3, figsize=(13, 4.6), width_ratios=(1.5, 1, 1))
    names = [r"$\mathcal{L}_1=0$", r"$\mathcal{L}_2=0$", r"$\mathcal{L}_3=0$",
             r"WP$(\mathcal{L})$", r"$\bigcup_\lambda\mathcal{S}(\lambda)$",
             r"$\mathcal{S}_{\rm val}$", "BMO", "BDS"]
    sets = [curves[key] for key in ("pareto", "union", "best", "bmo", "bds")]
    table = torch.cat([(curves["p"] == 1).T, torch.stack(sets)]).double()
    left.imshow(table, aspect="auto", cmap="Blues", vmin=0, vmax=1.3, interpolation="nearest")
    left.set_yticks(range(len(names)), names)
    left.set_xticks(torch.arange(0, 27, 2).tolist())
    left.set_xticks([i - 0.5 for i in range(28)], minor=True)
    left.set_yticks([i - 0.5 for i in range(9)], minor=True)
    left.grid(which="minor", color="white", lw=1)
    left.tick_params(which="minor", length=0)
    left.set(title=r"separable: 27 policies, $\pi(y^i|x^i)\in\{1,\frac{1}{2},0\}$",
             xlabel="policy (dark: belongs)")
    for axis, (name, front) in zip(others, curves["fronts"].items(), strict=True):
        losses = front.losses
        points = axis.scatter(*losses.T, c=front.val, cmap="viridis_r", s=18, zorder=2)
        axis.scatter(*losses[front.union].T, s=70, facecolors="none", edgecolors="C3", lw=0.9,
                     label=r"$\bigcup_\lambda\mathcal{S}(\lambda)$")
        axis.plot(*losses[front.bmo][0], "*", ms=16, color="C1", mec="k", label="BMO")
        axis.plot(*losses[front.bds][0], "X", ms=9, color="C0", mec="k", label="BDS")
        axis.set(title=f"not separable, {name}: " + ("same" if name == "convex" else "they part"),
                 xlabel=r"$\mathcal{L}_1$", ylabel=r"$\mathcal{L}_2$")
        axis.legend(fontsize=9, loc="upper right" if name == "convex" else "lower left")
        figure.colorbar(points, ax=axis, label=r"$\mathcal{L}_{\rm val}$")
    return figure


def draw_weights(plt, _, curves):
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.9))
    losses, lam, tau = curves["losses"], curves["lambda"], curves["tau"]
    equal, unequal = (curves[key] / curves[key].sum() for key in ("equal", "unequal"))
    axes[0].fill_between(tau, losses.min() - math.log(len(losses)) / tau, losses.min(), alpha=0.2,
                         label=r"$[\min\mathcal{L}-\log(M)/\tau,\ \min\mathcal{L}]$")
    axes[0].semilogx(tau, curves["u"], label=r"$-\mathrm{LSE}(-\mathcal{L};\tau)$")
    axes[0].set(title="merit function and its bounds", xlabel=r"$\tau$", ylabel="nats",
                ylim=(float(losses.min()) - 6, float(losses.min()) + 1))
    axes[0].legend(fontsize=9, loc="lower right")
    g = torch.arange(1, len(lam) + 1)
    for shift, (values, label) in enumerate((
            (lam, r"$\lambda_g$"), (equal, r"$r^g/\sum r$, equal old log-probs"),
            (unequal, r"$r^g/\sum r$, unequal"))):
        axes[1].bar(g + 0.27 * (shift - 1), values, 0.25, label=label)
    axes[1].set(title="importance ratio and implicit weight", xlabel=r"answer $g$",
                ylim=(0, 1.25 * float(max(lam.max(), unequal.max()))))
    axes[1].legend(fontsize=8)
    image = axes[2].imshow(curves["hessian"], cmap="RdBu_r", vmin=-0.25, vmax=0.25,
                           interpolation="nearest")
    axes[2].set(title=r"$\partial^2\mathcal{L}_{\rm SFT}/\partial\mathrm{vec}(z)^2$, $D=3$, $V=6$",
                xticks=range(0, 18, 6), yticks=range(0, 18, 6))
    figure.colorbar(image, ax=axes[2], shrink=0.8)
    eigenvalues = curves["eigenvalues"]
    axes[3].plot(range(1, len(eigenvalues) + 1), eigenvalues, "o")
    axes[3].axhline(0, color="k", lw=0.5)
    axes[3].set(title=r"its eigenvalues: none below zero", xlabel="index")
    return figure
