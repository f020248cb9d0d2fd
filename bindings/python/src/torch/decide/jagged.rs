//! The same of nested tensors of layout `torch.jagged`, `[batch, heads, sequence, head_dim]`, whose sequences have lengths of their own.
//!
//! A sequence of theirs is a dense request, and is decided as one: [`decide`] is asked of `[batch, heads, 1, head_dim]`, since
//! lengths are numbers in memory, which the run reads and checks. What nested tensors lack beside dense ones is added here:
//! no mask, no batch that broadcasts, and one number of heads of keys and values.

use rapt::Device;

use super::{Invalid, Kernel, Modes, Order, Reason, Request, Size, Stock, Verdict, decide};

/// How q, k or v of such a request is nested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nest {
    /// It is not.
    Not,
    /// `[batch, heads, sequence, head_dim]`; its sizes are those with a sequence of 1.
    Sequences,
    /// In another dimension, of another rank, or of strided layout.
    Otherwise,
}

/// Who answers a request of which q, k or v is nested.
///
/// # Errors
/// The fault of a size that a trace does not know.
pub(crate) fn decide_jagged<S: Size>(
    request: &Request<S>,
    nests: [Nest; 3],
    modes: Modes,
    stock: Stock,
) -> Result<Verdict, S::Fault> {
    let fallback = |reason| Ok(Verdict::Fallback(reason));
    let Request { q, k, v, mask, enable_gqa, .. } = request;
    for (name, nest) in ["q", "k", "v"].into_iter().zip(nests) {
        match nest {
            Nest::Not => return fallback(Reason::Invalid(Invalid::NotNested(name))),
            Nest::Otherwise => return fallback(Reason::Layout("jagged".to_owned())),
            Nest::Sequences => {}
        }
    }
    if mask.is_some() {
        return fallback(Reason::Invalid(Invalid::NestedMask));
    }
    if !matches!(q.device, Device::Cpu | Device::Cuda(_))
        && let Some(name) = request.first(|tensor| tensor.requires_grad).filter(|_| modes.grad)
    {
        return fallback(Reason::RequiresGrad(name));
    }
    if let Device::Mps(_) = q.device {
        return fallback(Reason::Device("mps".to_owned()));
    }
    // Sequences are of one order, whichever kernel PyTorch's function would take on a GPU.
    let verdict = decide(request, modes, stock, || Ok(Some(Kernel::Flash)))?;
    if !matches!(verdict, Verdict::Serve(_)) {
        return Ok(verdict);
    }
    if !q.sizes[0].equals(&k.sizes[0])? || !q.sizes[0].equals(&v.sizes[0])? {
        return fallback(Reason::Invalid(Invalid::Broadcast { heads: false }));
    }
    if *enable_gqa && !k.sizes[1].equals(&v.sizes[1])? {
        return fallback(Reason::Invalid(Invalid::Groups));
    }
    Ok(Verdict::Serve(Order::Bshd))
}
