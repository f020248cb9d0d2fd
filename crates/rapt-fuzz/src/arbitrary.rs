//! A request as bytes describe it: mostly well-formed, so that what is accepted is met often, and wrong in one place or two.
//!
//! Data layout: [`Unstructured`] reads choices from the front; a byte of 0 is always the ordinary choice, so an empty input
//! is plain attention. Deliberately absent: memory; see `operands`.

use arbitrary::{Result, Unstructured};
use rapt::{COMPUTED, Causal, Compute, DType, Options, Shape, Strides, TensorLayout, Window};

/// One tensor without memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorDesc {
    pub(crate) dtype: DType,
    pub(crate) shape: Shape,
    pub(crate) strides: Strides,
}

/// How large sizes and strides may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scale {
    /// A few elements, to be computed.
    Small,
    /// Anything that fits 64 bits.
    Any,
}

/// A whole request.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) q: TensorDesc,
    pub(crate) k: TensorDesc,
    pub(crate) v: TensorDesc,
    pub(crate) mask: Option<TensorDesc>,
    pub(crate) sinks: Option<TensorDesc>,
    pub(crate) alibi_slopes: Option<TensorDesc>,
    pub(crate) out: TensorDesc,
    pub(crate) lse: Option<TensorDesc>,
    pub(crate) options: Options,
}

/// True once in about `n`; never when the input has run dry.
pub(crate) fn once_in(u: &mut Unstructured<'_>, n: u8) -> Result<bool> {
    Ok(u.int_in_range(0..=n - 1)? == n - 1)
}

fn size(u: &mut Unstructured<'_>, scale: Scale) -> Result<usize> {
    if scale == Scale::Small {
        return Ok([1, 2, 3, 4, 5, 9, 17, 0][usize::from(u.int_in_range(0..=7u8)?)]);
    }
    Ok(match u.int_in_range(0..=15u8)? {
        0..=7 => 1 + usize::from(u.arbitrary::<u8>()?),
        8..=11 => usize::from(u.arbitrary::<u16>()?),
        12 => 0,
        13 => 1 << u.int_in_range(0..=63u8)?,
        14 => (1usize << u.int_in_range(0..=63u8)?).wrapping_sub(1),
        _ => u.arbitrary()?,
    })
}

fn dtype(u: &mut Unstructured<'_>, usual: DType) -> Result<DType> {
    if once_in(u, 24)? { Ok(*u.choose(DType::ALL)?) } else { Ok(usual) }
}

/// Strides of `shape`: row-major, in a permuted order, expanded, reversed, stepped, or any numbers.
fn strides(u: &mut Unstructured<'_>, shape: &[usize], scale: Scale) -> Result<Strides> {
    let rank = shape.len();
    let mut order: Vec<usize> = (0..rank).collect();
    let kind = u.int_in_range(0..=15u8)?;
    if kind >= 6 {
        for at in (1..rank).rev() {
            order.swap(at, u.int_in_range(0..=at)?);
        }
    }
    let mut at = vec![0isize; rank];
    let mut step = if kind >= 12 { isize::from(u.int_in_range(1..=3u8)?) } else { 1 };
    for &d in order.iter().rev() {
        at[d] = step;
        let gap = if kind == 13 { isize::from(u.int_in_range(0..=2u8)?) } else { 0 };
        step = step.wrapping_mul((shape[d].max(1) as isize).wrapping_add(gap));
    }
    for stride in &mut at {
        match kind {
            9 if u.arbitrary()? => *stride = 0,
            10 | 12 if u.arbitrary()? => *stride = stride.wrapping_neg(),
            14 => *stride = isize::from(u.arbitrary::<i8>()?),
            15 if scale == Scale::Any => *stride = u.arbitrary()?,
            _ => {}
        }
    }
    Ok(Strides::new(&at).expect("no more dimensions than its shape"))
}

pub(crate) fn tensor(u: &mut Unstructured<'_>, usual: DType, sizes: &[usize], scale: Scale) -> Result<TensorDesc> {
    let mut sizes = sizes.to_vec();
    if once_in(u, 32)? {
        match u.int_in_range(0..=3u8)? {
            0 => sizes.push(size(u, scale)?),
            1 => drop(sizes.pop()),
            _ if sizes.is_empty() => {}
            _ => {
                let at = u.choose_index(sizes.len())?;
                sizes[at] = size(u, scale)?;
            }
        }
    }
    let strides = strides(u, &sizes, scale)?;
    Ok(TensorDesc { dtype: dtype(u, usual)?, shape: Shape::new(&sizes).expect("six dimensions at most"), strides })
}

/// A float that a mask, a vector or an output may have beside `storage`, or a wrong one.
fn beside(u: &mut Unstructured<'_>, storage: DType) -> Result<DType> {
    Ok(if once_in(u, 4)? { *u.choose(&COMPUTED)? } else { storage })
}

fn number(u: &mut Unstructured<'_>) -> Result<f64> {
    Ok(match u.int_in_range(0..=3u8)? {
        0 => 1.0,
        1 => f64::from(u.arbitrary::<i8>()?) / 8.0,
        _ => u.arbitrary()?,
    })
}

fn window_end(u: &mut Unstructured<'_>) -> Result<Option<usize>> {
    Ok(match u.int_in_range(0..=3u8)? {
        0 => None,
        1 | 2 => Some(usize::from(u.arbitrary::<u8>()?)),
        _ => Some(u.arbitrary()?),
    })
}

impl Request {
    pub(crate) fn new(u: &mut Unstructured<'_>, scale: Scale) -> Result<Self> {
        let rank = [4usize, 4, 3, 2][usize::from(u.int_in_range(0..=3u8)?)];
        let layout = if once_in(u, 3)? { TensorLayout::Bshd } else { TensorLayout::Bhsd };
        let storage = COMPUTED[u.choose_index(COMPUTED.len())?];
        let (batch, kv_heads) = (size(u, scale)?, size(u, scale)?);
        let group = if once_in(u, 3)? { size(u, scale)? } else { 1 };
        let (q_len, kv_len, head_dim) = (size(u, scale)?, size(u, scale)?, size(u, scale)?);
        let head_dim_v = if once_in(u, 3)? { size(u, scale)? } else { head_dim };
        let heads = kv_heads.wrapping_mul(group);
        let given = |heads: usize, len: usize, dim: usize| match (rank, layout) {
            (2, _) => vec![len, dim],
            (3, TensorLayout::Bhsd) => vec![heads, len, dim],
            (3, TensorLayout::Bshd) => vec![len, heads, dim],
            (_, TensorLayout::Bhsd) => vec![batch, heads, len, dim],
            (_, TensorLayout::Bshd) => vec![batch, len, heads, dim],
        };
        let q = tensor(u, storage, &given(heads, q_len, head_dim), scale)?;
        let k = tensor(u, storage, &given(kv_heads, kv_len, head_dim), scale)?;
        let v = tensor(u, storage, &given(kv_heads, kv_len, head_dim_v), scale)?;
        let (batch, heads) = if rank == 4 { (batch, heads) } else { (1, if rank == 3 { heads } else { 1 }) };
        let mask = if once_in(u, 3)? {
            let mut sizes = vec![batch, heads, q_len, kv_len];
            for size in &mut sizes {
                if once_in(u, 3)? {
                    *size = 1;
                }
            }
            sizes.drain(..usize::from(u.int_in_range(0..=3u8)?));
            let usual = if u.arbitrary()? { DType::Bool } else { beside(u, storage)? };
            Some(tensor(u, usual, &sizes, scale)?)
        } else {
            None
        };
        let vector = |u: &mut Unstructured<'_>| -> Result<Option<TensorDesc>> {
            if !once_in(u, 6)? {
                return Ok(None);
            }
            let usual = beside(u, storage)?;
            Ok(Some(tensor(u, usual, &[heads], scale)?))
        };
        let (sinks, alibi_slopes) = (vector(u)?, vector(u)?);
        let out_dtype = if once_in(u, 6)? { Some(beside(u, storage)?) } else { None };
        let out = tensor(u, out_dtype.unwrap_or(storage), &given(heads, q_len, head_dim_v), scale)?;
        let lse = if once_in(u, 2)? {
            let sizes = &[batch, heads, q_len][4 - rank..];
            Some(tensor(u, storage.accumulation(), sizes, scale)?)
        } else {
            None
        };
        let options = Options {
            softmax_scale: if once_in(u, 4)? { Some(number(u)?) } else { None },
            softcap: if once_in(u, 6)? { Some(number(u)?) } else { None },
            causal: *u.choose(&[None, Some(Causal::TopLeft), Some(Causal::BottomRight)])?,
            window: if once_in(u, 4)? {
                Window { left: window_end(u)?, right: window_end(u)? }
            } else {
                Window::default()
            },
            layout,
            out_dtype,
            compute: if once_in(u, 8)? { *u.choose(&Compute::ALL)? } else { Compute::Exact },
            dropout_p: 0.0,
        };
        Ok(Request { q, k, v, mask, sinks, alibi_slopes, out, lse, options })
    }
}
