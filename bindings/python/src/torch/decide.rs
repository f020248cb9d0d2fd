//! Who answers a call of `scaled_dot_product_attention`: Rapt, PyTorch's own kernel, or nobody. The one place where it is decided.
//!
//! ```text
//! Request (dtypes, sizes, devices, gradients, options, modes) ──decide──► Serve(order of the output's dimensions)
//!                                                                         Fallback(why PyTorch's own kernel must answer)
//!                                                                         Refuse(what PyTorch would compute wrongly)
//! ```
//! While registered, a `Fallback` goes to PyTorch, whose error it then is if the request is invalid; Rapt's own functions raise it
//! as a typed error. So validity is PyTorch's on every route: `sdp_utils_cpp.cpp` and `_math_attention` of torch 2.15, and where
//! versions differ, [`Stock`] says what the installed one does.
//!
//! Pure: no tensor, no Python, no device. Sizes are any [`Size`]: numbers, or the symbols of a trace, which record a guard
//! whenever they are compared. Deliberately absent: strides but the innermost, which is all that PyTorch's choice depends on.

use std::borrow::Cow;
use std::fmt;

use rapt::{DType, Device, MAX_RANK};

#[path = "decide/jagged.rs"]
mod jagged;

pub(crate) use jagged::{Nest, decide_jagged};

/// A size as far as a decision needs it; a comparison may fail where a trace does not know it.
pub(crate) trait Size: Clone + fmt::Display {
    /// Why a comparison has no answer.
    type Fault;
    /// Whether both are the same number.
    fn equals(&self, other: &Self) -> Result<bool, Self::Fault>;
    /// Whether this is `number`.
    fn is(&self, number: usize) -> Result<bool, Self::Fault>;
    /// Whether this is `number` or less.
    fn is_at_most(&self, number: usize) -> Result<bool, Self::Fault>;
    /// `number` as a size.
    fn from_number(number: usize) -> Self;
    /// Whether `divisor`, which is not 0, divides this.
    fn is_multiple_of(&self, divisor: &Self) -> Result<bool, Self::Fault>;
    /// The number, if it is one.
    fn number(&self) -> Option<usize>;
}

impl Size for usize {
    type Fault = std::convert::Infallible;
    fn from_number(number: usize) -> Self {
        number
    }
    fn equals(&self, other: &Self) -> Result<bool, Self::Fault> {
        Ok(self == other)
    }
    fn is(&self, number: usize) -> Result<bool, Self::Fault> {
        Ok(*self == number)
    }
    fn is_at_most(&self, number: usize) -> Result<bool, Self::Fault> {
        Ok(*self <= number)
    }
    fn is_multiple_of(&self, divisor: &Self) -> Result<bool, Self::Fault> {
        Ok(usize::is_multiple_of(*self, *divisor))
    }
    fn number(&self) -> Option<usize> {
        Some(*self)
    }
}

/// Declares [`Reason`]: what is counted, each under its text in `stats()`; `…` stands for what the variant carries.
macro_rules! reasons {
    ($($(#[doc = $doc:literal])* $variant:ident $(($carried:ty))? => $text:literal,)*) => {
        /// Why PyTorch's own kernel must answer.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub(crate) enum Reason {
            $($(#[doc = $doc])* $variant $(($carried))?,)*
        }

        impl Reason {
            /// The text of every reason.
            pub(crate) const TEXTS: &[&str] = &[$($text),*];

            fn text(&self) -> &'static str {
                match self {
                    $(Reason::$variant $((reasons!(@ignore $carried)))? => $text,)*
                }
            }
        }
    };
    (@ignore $carried:ty) => { _ };
}

reasons! {
    /// Grad mode is on and this tensor, of an Apple GPU, requires grad.
    RequiresGrad(&'static str) => "requires grad",
    /// `dropout_p` is not 0, on an Apple GPU; or it is no probability.
    Dropout => "dropout",
    /// `dropout_p` is not 0 while a CUDA graph is captured: its draw would be the same in every replay.
    /// A forward-mode AD level is open, where a dual tensor would lose its tangent.
    ForwardAd => "forward-mode AD",
    /// `sdpa_kernel([MATH])` (or its flags) left no fused kernel.
    OnlyMath => "sdpa_kernel([MATH])",
    /// MATH is forbidden and no fused kernel of PyTorch's takes the request.
    KernelNotAllowed => "kernel not allowed",
    /// PyTorch does not take it.
    Invalid(Invalid) => "invalid request",
    /// Not one of the dtypes that attention computes.
    Dtype(String) => "dtype …",
    /// A class with its own idea of an op.
    Subclass(String) => "tensor subclass …",
    /// A device that Rapt does not serve.
    Device(String) => "device …",
    /// Sparse, strided nested, or jagged otherwise than in sequences.
    Layout(String) => "layout …",
    /// Integers that stand for other numbers.
    Quantized => "quantized",
    /// A negation or conjugation that is not yet in memory.
    LazyNegation => "lazy negation",
    /// vmap, grad and the like of torch.func.
    Functorch => "functorch transform",
    /// NaN or infinite.
    ScaleNotFinite => "scale not finite",
    /// Rows without elements.
    ZeroHeadDim => "head_dim 0",
    /// An empty tensor among shapes that do not fit, or that give the answer other leading sizes than q's: PyTorch gives zeros of q's.
    EmptyInput => "empty input",
    /// More dimensions than Rapt reads.
    TooManyDimensions => "more than 8 dimensions",
    /// The attention probabilities are asked for, as the GPU's flash op can.
    DebugMask => "debug mask",
}

impl Reason {
    /// The key in `stats()["fallback"]`.
    pub(crate) fn label(&self) -> Cow<'static, str> {
        match self {
            Reason::Dtype(what) | Reason::Subclass(what) | Reason::Device(what) | Reason::Layout(what) => {
                Cow::Owned(self.text().replace('…', what))
            }
            _ => Cow::Borrowed(self.text()),
        }
    }
}

/// What PyTorch does not take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Invalid {
    /// This tensor has another dtype than q.
    Dtype(&'static str),
    /// Both ask for what may be seen.
    MaskAndCausal,
    /// A mask is of bool, q's dtype or float32.
    MaskDtype,
    /// This tensor has less than two dimensions, with `enable_gqa` less than three.
    Rank(&'static str),
    /// This tensor lies on another device than q.
    Device(&'static str),
    /// q and k have rows of different length.
    HeadDim,
    /// The heads of k or v do not divide those of q.
    Groups,
    /// Leading sizes that are neither equal nor 1; `heads`: the last of them.
    Broadcast {
        /// Whether it is the heads that differ.
        heads: bool,
    },
    /// The mask does not broadcast to the scores.
    MaskShape,
    /// Another tensor is nested, this one is not.
    NotNested(&'static str),
    /// A mask beside nested tensors.
    NestedMask,
}

/// What is raised on every route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// K and V of different length: PyTorch's CPU flash takes them and reads past the end of the shorter one.
    KvLen,
}

/// How the output's dimensions follow one another in memory, as PyTorch's own would.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// The last fastest.
    RowMajor,
    /// As those of q.
    Query,
    /// `[batch, q_len, num_q_heads, head_dim_v]`.
    Bshd,
}

impl Order {
    /// The name that Python uses.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Order::RowMajor => "row_major",
            Order::Query => "query",
            Order::Bshd => "bshd",
        }
    }
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Rapt computes it.
    Serve(Order),
    /// PyTorch's own kernel must.
    Fallback(Reason),
    /// Nobody does.
    Refuse(Refusal),
}

/// A tensor as far as a decision needs it.
#[derive(Clone, Debug)]
pub(crate) struct Tensor<S> {
    /// Where it lies.
    pub(crate) device: Device,
    /// Its dtype, by name if Rapt has none for it.
    pub(crate) dtype: Result<DType, String>,
    /// Its sizes.
    pub(crate) sizes: Vec<S>,
    /// The last stride, in elements.
    pub(crate) inner_stride: S,
    /// Whether it asks for a gradient: a request that is served keeps what its backward needs where grad mode is on.
    pub(crate) requires_grad: bool,
    /// Why its memory is not its value, if it is not.
    pub(crate) obstacle: Option<Reason>,
}

impl<S> Tensor<S> {
    fn rank(&self) -> usize {
        self.sizes.len()
    }
    /// The dimension `from_end` steps before the end, of at least as many.
    fn size(&self, from_end: usize) -> &S {
        &self.sizes[self.sizes.len() - from_end]
    }
    fn leading(&self, without: usize) -> &[S] {
        &self.sizes[..self.sizes.len() - without]
    }
}

/// PyTorch's kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kernel {
    /// The formula in PyTorch's own ops.
    Math,
    /// Flash attention.
    Flash,
    /// The memory-efficient kernel of the GPU.
    Efficient,
    /// cuDNN's.
    Cudnn,
}

/// Which of PyTorch's kernels may answer: the flags behind `sdpa_kernel`. Rapt's own functions stand outside of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allowed {
    /// Whether flash, the memory-efficient kernel or cuDNN may.
    pub(crate) fused: bool,
    /// Whether math may.
    pub(crate) math: bool,
}

/// What is in force around a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Modes {
    /// Grad mode.
    pub(crate) grad: bool,
    /// Forward-mode AD.
    pub(crate) forward_ad: bool,
    /// `sdpa_kernel`.
    pub(crate) allowed: Allowed,
    /// Whether the sizes are those of a trace: PyTorch's choice on the GPU is then foreseen, not asked.
    pub(crate) traced: bool,
}

impl Modes {
    /// Nothing out of the ordinary: the state in which a decision may be remembered.
    pub(crate) const ORDINARY: Modes =
        Modes { grad: false, forward_ad: false, allowed: Allowed { fused: true, math: true }, traced: false };
}

/// What the installed torch does on the CPU, where versions differ.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stock {
    /// The flash output has the strides of q; else it is `[batch, q_len, num_q_heads, head_dim]` transposed.
    pub(crate) follows_query: bool,
    /// Rank 3 goes to flash too.
    pub(crate) rank3: bool,
    /// An empty input is answered by zeros before all else.
    pub(crate) shortcut: bool,
    /// Flash takes unexpanded groups with `enable_gqa`.
    pub(crate) gqa: bool,
    /// And one K/V head for all without it.
    pub(crate) one_head: bool,
}

impl Stock {
    /// torch 2.15: the rules for numpy and DLPack.
    pub(crate) const NEWEST: Stock =
        Stock { follows_query: true, rank3: true, shortcut: true, gqa: true, one_head: true };
}

/// A request, but for its pointers.
#[derive(Clone, Debug)]
pub(crate) struct Request<S> {
    /// `[..., q_len, head_dim]`.
    pub(crate) q: Tensor<S>,
    /// `[..., kv_len, head_dim]`.
    pub(crate) k: Tensor<S>,
    /// `[..., kv_len, head_dim_v]`.
    pub(crate) v: Tensor<S>,
    /// Broadcastable to `[..., q_len, kv_len]`.
    pub(crate) mask: Option<Tensor<S>>,
    /// The probability that a weight is dropped.
    pub(crate) dropout_p: f64,
    /// `j ≤ i`.
    pub(crate) is_causal: bool,
    /// The factor of `q·k`.
    pub(crate) scale: Option<f64>,
    /// Whether heads of k and v serve groups of q's.
    pub(crate) enable_gqa: bool,
}

impl<S: Size> Request<S> {
    fn tensors(&self) -> impl Iterator<Item = (&'static str, &Tensor<S>)> {
        let three = [("q", &self.q), ("k", &self.k), ("v", &self.v)];
        three.into_iter().chain(self.mask.as_ref().map(|mask| ("mask", mask)))
    }

    /// Whether one of its tensors asks for a gradient.
    pub(crate) fn requires_grad(&self) -> bool {
        self.first(|tensor| tensor.requires_grad).is_some()
    }

    fn first(&self, wanted: impl Fn(&Tensor<S>) -> bool) -> Option<&'static str> {
        self.tensors().find(|(_, tensor)| wanted(tensor)).map(|(name, _)| name)
    }
}

/// Who answers. `choose` is what PyTorch's own choice on the GPU would be (`None`: no kernel is allowed); it is asked at most once.
///
/// # Errors
/// The fault of a size that a trace does not know, or of `choose`.
pub(crate) fn decide<S: Size, E: From<S::Fault>>(
    request: &Request<S>,
    modes: Modes,
    stock: Stock,
    choose: impl FnOnce() -> Result<Option<Kernel>, E>,
) -> Result<Verdict, E> {
    if let Some(verdict) = before_shapes(request, modes)? {
        return Ok(verdict);
    }
    let Request { q, k, v, .. } = request;
    let unfit = shapes(request, stock)?;
    let is_odd_scale = request.scale.is_some_and(|scale| !scale.is_finite());
    if has_zero(&q.sizes)? || has_zero(&k.sizes)? || has_zero(&v.sizes)? {
        let verdict = empty(request, stock, unfit)?;
        let served = matches!(verdict, Verdict::Serve(_));
        return Ok(if served && is_odd_scale { Verdict::Fallback(Reason::ScaleNotFinite) } else { verdict });
    }
    if let Some(invalid) = unfit {
        return Ok(Verdict::Fallback(Reason::Invalid(invalid)));
    }
    let Some(order) = order(request, modes, stock, choose)? else {
        return Ok(Verdict::Fallback(Reason::KernelNotAllowed));
    };
    if is_odd_scale {
        return Ok(Verdict::Fallback(Reason::ScaleNotFinite));
    }
    Ok(Verdict::Serve(order))
}

/// What needs no shape but the lengths of k and v: plain memory, gradients, modes, dtypes, devices, ranks.
fn before_shapes<S: Size>(request: &Request<S>, modes: Modes) -> Result<Option<Verdict>, S::Fault> {
    let Request { q, k, v, mask, .. } = request;
    let fallback = |reason| Ok(Some(Verdict::Fallback(reason)));
    if request.tensors().any(|(_, tensor)| tensor.rank() > MAX_RANK) {
        return fallback(Reason::TooManyDimensions);
    }
    if let Some(reason) = request.tensors().find_map(|(_, tensor)| tensor.obstacle.clone()) {
        return fallback(reason);
    }
    if k.rank() >= 2 && v.rank() >= 2 && !k.size(2).equals(v.size(2))? {
        return Ok(Some(Verdict::Refuse(Refusal::KvLen)));
    }
    if !matches!(q.device, Device::Cpu | Device::Cuda(_))
        && let Some(name) = request.first(|tensor| tensor.requires_grad).filter(|_| modes.grad)
    {
        return fallback(Reason::RequiresGrad(name));
    }
    // Below 0 is how one kernel of PyTorch's marks a call for another.
    let has_kernel = matches!(q.device, Device::Cpu | Device::Cuda(_)) && (0.0..=1.0).contains(&request.dropout_p);
    if request.dropout_p != 0.0 && !has_kernel {
        return fallback(Reason::Dropout);
    }
    if modes.forward_ad {
        return fallback(Reason::ForwardAd);
    }
    if !modes.allowed.fused {
        return fallback(Reason::OnlyMath);
    }
    for (name, tensor) in [("k", k), ("v", v)] {
        if tensor.dtype != q.dtype {
            return fallback(Reason::Invalid(Invalid::Dtype(name)));
        }
    }
    let dtype = match &q.dtype {
        Ok(dtype) if dtype.is_computed() => *dtype,
        Ok(dtype) => return fallback(Reason::Dtype(dtype.name().to_owned())),
        Err(name) => return fallback(Reason::Dtype(name.clone())),
    };
    if let Some(mask) = mask {
        if request.is_causal {
            return fallback(Reason::Invalid(Invalid::MaskAndCausal));
        }
        if ![Ok(DType::Bool), Ok(dtype), Ok(DType::F32)].contains(&mask.dtype) {
            return fallback(Reason::Invalid(Invalid::MaskDtype));
        }
    }
    for (name, tensor) in [("q", q), ("k", k), ("v", v)] {
        if tensor.rank() < 2 {
            return fallback(Reason::Invalid(Invalid::Rank(name)));
        }
    }
    if let Some(name) = request.first(|tensor| tensor.device != q.device) {
        return fallback(Reason::Invalid(Invalid::Device(name)));
    }
    Ok(None)
}

/// A request with an empty tensor. Rapt answers one whose shapes fit, in q's own leading sizes, which all versions of PyTorch do.
fn empty<S: Size>(request: &Request<S>, stock: Stock, unfit: Option<Invalid>) -> Result<Verdict, S::Fault> {
    let Request { q, k, v, enable_gqa, .. } = request;
    let own_zeros = |otherwise| Ok(Verdict::Fallback(if stock.shortcut { Reason::EmptyInput } else { otherwise }));
    if let Some(invalid) = unfit {
        return own_zeros(Reason::Invalid(invalid));
    }
    if q.size(1).is(0)? || v.size(1).is(0)? {
        return own_zeros(Reason::ZeroHeadDim);
    }
    let heads = usize::from(*enable_gqa);
    let (own, k, v) = (q.leading(2 + heads), k.leading(2 + heads), v.leading(2 + heads));
    let whole = match broadcast(own, k)? {
        Some(both) => broadcast(&both, v)?,
        None => None,
    };
    let Some(whole) = whole else { return own_zeros(Reason::EmptyInput) };
    if whole.len() != own.len() || !all_equal(&whole, own)? {
        return Ok(Verdict::Fallback(Reason::EmptyInput));
    }
    Ok(Verdict::Serve(Order::RowMajor))
}

fn has_zero<S: Size>(sizes: &[S]) -> Result<bool, S::Fault> {
    for size in sizes {
        if size.is(0)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn all_equal<S: Size>(left: &[S], right: &[S]) -> Result<bool, S::Fault> {
    for (a, b) in left.iter().zip(right) {
        if !a.equals(b)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The common shape, or `None`.
fn broadcast<S: Size>(left: &[S], right: &[S]) -> Result<Option<Vec<S>>, S::Fault> {
    let (long, short) = if left.len() >= right.len() { (left, right) } else { (right, left) };
    let mut out = long.to_vec();
    let from = long.len() - short.len();
    for (at, size) in out[from..].iter_mut().zip(short) {
        if size.is(1)? {
            continue;
        }
        if at.is(1)? {
            *at = size.clone();
        } else if !at.equals(size)? {
            return Ok(None);
        }
    }
    Ok(Some(out))
}

/// What does not fit, or `None`. Ranks are 2 at least, and k and v of one length.
fn shapes<S: Size>(request: &Request<S>, stock: Stock) -> Result<Option<Invalid>, S::Fault> {
    let Request { q, k, v, mask, enable_gqa, .. } = request;
    if !q.size(1).equals(k.size(1))? {
        return Ok(Some(Invalid::HeadDim));
    }
    let mut scores = if *enable_gqa {
        if let Some(name) = [("q", q), ("k", k), ("v", v)].iter().find(|(_, t)| t.rank() < 3).map(|(name, _)| *name) {
            return Ok(Some(Invalid::Rank(name)));
        }
        let heads = q.size(3);
        for of in [k.size(3), v.size(3)] {
            if of.is(0)? || !heads.is_multiple_of(of)? {
                return Ok(Some(Invalid::Groups));
            }
        }
        let Some(mut batch) = broadcast(q.leading(3), k.leading(3))? else {
            return Ok(Some(Invalid::Broadcast { heads: false }));
        };
        if broadcast(&batch, v.leading(3))?.is_none() {
            return Ok(Some(Invalid::Broadcast { heads: false }));
        }
        batch.push(heads.clone());
        batch
    } else {
        let whole = match broadcast(q.leading(2), k.leading(2))? {
            Some(scores) => broadcast(&scores, v.leading(2))?.map(|_| scores),
            None => None,
        };
        let Some(scores) = whole else {
            let heads = [q, k, v].iter().all(|tensor| tensor.rank() > 2);
            let heads = heads && {
                let [a, b, c] = [q.size(3), k.size(3), v.size(3)].map(std::slice::from_ref);
                match broadcast(a, b)? {
                    Some(both) => broadcast(&both, c)?.is_none(),
                    None => true,
                }
            };
            return Ok(Some(Invalid::Broadcast { heads }));
        };
        scores
    };
    let Some(mask) = mask else { return Ok(None) };
    // PyTorch adds the mask to the scores in place: it may be broadcast, the scores may not. And where flash might take the
    // request it asks the mask for its second-last dimension.
    scores.extend([q.size(2).clone(), k.size(2).clone()]);
    let asks_rank = || -> Result<bool, S::Fault> {
        let four = q.rank() == 4 && k.rank() == 4 && v.rank() == 4;
        Ok(four && heads_fit([&q.sizes, &k.sizes, &v.sizes], *enable_gqa, stock)?)
    };
    if mask.rank() > scores.len() || (mask.rank() < 2 && asks_rank()?) {
        return Ok(Some(Invalid::MaskShape));
    }
    for (size, of) in mask.sizes.iter().rev().zip(scores.iter().rev()) {
        if !size.is(1)? && !size.equals(of)? {
            return Ok(Some(Invalid::MaskShape));
        }
    }
    Ok(None)
}

/// Whether PyTorch's CPU flash takes these batches and heads, of four sizes each.
fn heads_fit<S: Size>([q, k, v]: [&[S]; 3], enable_gqa: bool, stock: Stock) -> Result<bool, S::Fault> {
    if !(q[0].equals(&k[0])? && k[0].equals(&v[0])? && k[1].equals(&v[1])?) {
        return Ok(false);
    }
    Ok(q[1].equals(&k[1])? || (enable_gqa && stock.gqa) || (k[1].is(1)? && stock.one_head))
}

/// Whether PyTorch's CPU flash kernel would take this valid request (else its math path does).
fn is_flash<S: Size>(request: &Request<S>, stock: Stock) -> Result<bool, S::Fault> {
    let Request { q, k, v, mask, enable_gqa, .. } = request;
    let rank = q.rank();
    if k.rank() != rank || v.rank() != rank || request.dropout_p != 0.0 {
        return Ok(false);
    }
    let has_batch = rank == 4;
    let without_batch = rank == 3 && stock.rank3;
    if !has_batch && !without_batch {
        return Ok(false);
    }
    let heads_fit = if has_batch {
        heads_fit([&q.sizes, &k.sizes, &v.sizes], *enable_gqa, stock)?
    } else {
        // The batch that rank 3 lacks is 1 in all three.
        let with_batch = |tensor: &Tensor<S>| [&[tensor.sizes[0].clone()], &tensor.sizes[..]].concat();
        let (q, mut k, mut v) = (with_batch(q), with_batch(k), with_batch(v));
        (k[0], v[0]) = (q[0].clone(), q[0].clone());
        heads_fit([&q, &k, &v], *enable_gqa, stock)?
    };
    let one_dim = q.size(1).equals(k.size(1))? && k.size(1).equals(v.size(1))?;
    if !heads_fit || !one_dim {
        return Ok(false);
    }
    if let Some(mask) = mask {
        // Whatever the grad mode: its flash kernel gives a mask no gradient.
        if mask.requires_grad {
            return Ok(false);
        }
        let ranks: &[usize] = if has_batch { &[2, 4] } else { &[1, 2, 3] };
        if !ranks.contains(&mask.rank()) {
            return Ok(false);
        }
    }
    has_unit_strides([q, k, v])
}

fn has_unit_strides<S: Size>(tensors: [&Tensor<S>; 3]) -> Result<bool, S::Fault> {
    for tensor in tensors {
        if !tensor.inner_stride.is(1)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The order of PyTorch's output for this valid request without an empty tensor; `None` if no kernel that takes it is allowed.
fn order<S: Size, E: From<S::Fault>>(
    request: &Request<S>,
    modes: Modes,
    stock: Stock,
    choose: impl FnOnce() -> Result<Option<Kernel>, E>,
) -> Result<Option<Order>, E> {
    let Modes { allowed, traced, .. } = modes;
    if matches!(request.q.device, Device::Mps(_)) {
        // Its one kernel there stands for math.
        return Ok(allowed.math.then_some(Order::RowMajor));
    }
    if !matches!(request.q.device, Device::Cuda(_)) {
        let flash = is_flash(request, stock)?;
        let by_flash = if stock.follows_query { Order::Query } else { Order::Bshd };
        return Ok((flash || allowed.math).then_some(if flash { by_flash } else { Order::RowMajor }));
    }
    if request.q.rank() != 4 && allowed.math {
        return Ok(Some(Order::RowMajor));
    }
    let kernel = if traced { Some(foreseen(request)?) } else { choose()? };
    Ok(match kernel {
        None => None,
        Some(Kernel::Math) => allowed.math.then_some(Order::RowMajor),
        Some(_) if request.q.rank() != 4 => Some(Order::RowMajor),
        // Flash and cuDNN follow the order of q's dimensions.
        Some(Kernel::Flash | Kernel::Cudnn) => Some(Order::Query),
        Some(Kernel::Efficient) => Some(Order::Bshd),
    })
}

/// PyTorch's choice on a GPU of sm_80 or later with every kernel allowed, from sizes, strides and dtypes alone: a fake tensor, of
/// which PyTorch cannot be asked, and the run of the graph that holds it must agree.
fn foreseen<S: Size>(request: &Request<S>) -> Result<Kernel, S::Fault> {
    let Request { q, k, v, mask, enable_gqa, is_causal, .. } = request;
    if q.rank() != 4 || k.rank() != 4 || v.rank() != 4 || !has_unit_strides([q, k, v])? {
        return Ok(Kernel::Math);
    }
    if !q.sizes[0].equals(&k.sizes[0])? || q.dtype == Ok(DType::F64) {
        return Ok(Kernel::Math);
    }
    let half = q.dtype == Ok(DType::F16) || q.dtype == Ok(DType::BF16);
    let same_heads = q.sizes[1].equals(&k.sizes[1])? && k.sizes[1].equals(&v.sizes[1])?;
    let (head_dim, head_dim_v) = (q.size(1), v.size(1));
    if half && mask.is_none() && head_dim.equals(head_dim_v)? && head_dim.is_at_most(256)? {
        let square = !is_causal || q.size(2).equals(k.size(2))?;
        if square && (same_heads || *enable_gqa) {
            return Ok(Kernel::Flash);
        }
    }
    let unit = S::from_number(if half { 8 } else { 4 });
    let fits = same_heads && head_dim.is_multiple_of(&unit)? && head_dim_v.is_multiple_of(&unit)?;
    Ok(if fits { Kernel::Efficient } else { Kernel::Math })
}
