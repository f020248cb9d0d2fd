//! Sizes, strides, dtypes and options of any value: a typed refusal, or a spec that says what was asked and plans that do not wrap.

use std::hash::{DefaultHasher, Hash, Hasher};

use arbitrary::{Result as Parsed, Unstructured};
use rapt::{Caps, Device, Error, Extent, Kernel, Result, Spec, TensorForm, View};

use crate::arbitrary::{Request, Scale, TensorDesc, once_in};
use crate::check_refusal;

/// Whether the bytes describe a request that is accepted.
///
/// # Panics
/// If a promise of `Spec` or `select` is broken.
#[must_use]
pub fn spec(data: &[u8]) -> bool {
    let mut u = Unstructured::new(data);
    let Ok((request, given, caps)) = parse(&mut u) else { return false };
    match build(&request, given) {
        Ok(spec) => {
            check(&request, &spec, &caps);
            true
        }
        Err(error) => {
            check_refusal(&error);
            false
        }
    }
}

/// How the outputs are described.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Given {
    /// Row-major, as the spec makes them.
    New,
    /// As described.
    Own,
}

fn parse(u: &mut Unstructured<'_>) -> Parsed<(Request, Given, Caps)> {
    let request = Request::new(u, Scale::Any)?;
    let given = if once_in(u, 2)? { Given::Own } else { Given::New };
    Ok((request, given, caps(u)?))
}

/// An instruction set of this machine, and any number of threads.
pub(crate) fn caps(u: &mut Unstructured<'_>) -> Parsed<Caps> {
    let threads = match u.int_in_range(0..=3u8)? {
        0 => 1,
        1 | 2 => 1 + usize::from(u.arbitrary::<u8>()?),
        _ => u.arbitrary()?,
    };
    Ok(Caps {
        arch: *u.choose(rapt::available_isas())?,
        threads,
        clock_hz: u.arbitrary::<Option<u32>>()?.map(f64::from),
    })
}

/// A view that is never read: `Spec`, `select`, certificates and `explain` look at pointers as numbers.
pub(crate) fn unread(tensor: &'static str, desc: &TensorDesc, address: usize) -> Result<View<'static>> {
    let ptr = std::ptr::without_provenance(address);
    let TensorDesc { dtype, shape, strides } = *desc;
    // SAFETY: no element is ever read or written through it; see above.
    unsafe { View::from_raw_parts(tensor, ptr, dtype, shape, strides, Device::Cpu, Extent::Declared) }
}

/// The middle of the address space, so that negative strides have room.
pub(crate) const SOMEWHERE: usize = 1 << 62;

fn build(request: &Request, given: Given) -> Result<Spec> {
    let optional =
        |tensor, desc: &Option<TensorDesc>| desc.as_ref().map(|desc| unread(tensor, desc, SOMEWHERE)).transpose();
    let q = unread("q", &request.q, SOMEWHERE)?;
    let k = unread("k", &request.k, SOMEWHERE)?;
    let v = unread("v", &request.v, SOMEWHERE)?;
    let (mask, sinks) = (optional("mask", &request.mask)?, optional("sinks", &request.sinks)?);
    let alibi_slopes = optional("alibi_slopes", &request.alibi_slopes)?;
    let mut builder = Spec::builder(&q, &k, &v, &request.options);
    builder.mask(mask.as_ref()).sinks(sinks.as_ref()).alibi_slopes(alibi_slopes.as_ref());
    match given {
        Given::New => builder.return_lse(request.lse.is_some()),
        Given::Own => {
            let form = |desc: TensorDesc| TensorForm::new(desc.dtype, desc.shape, desc.strides, Device::Cpu);
            let builder = builder.out(form(request.out));
            match request.lse {
                Some(lse) => builder.lse(form(lse)),
                None => builder,
            }
        }
    };
    builder.build()
}

fn hash(spec: &Spec) -> u64 {
    let mut hasher = DefaultHasher::new();
    spec.hash(&mut hasher);
    hasher.finish()
}

fn check(request: &Request, spec: &Spec, caps: &Caps) {
    let dtypes = [request.q.dtype, request.k.dtype, request.v.dtype, spec.numerics.storage];
    assert!(dtypes.iter().all(|dtype| *dtype == dtypes[0] && dtype.is_computed()), "{dtypes:?}");
    let [batch, heads, q_len, head_dim] = spec.q.shape;
    assert_eq!(spec.k.shape, [batch, spec.num_kv_heads(), spec.kv_len(), head_dim]);
    assert_eq!(spec.v.shape, [batch, spec.num_kv_heads(), spec.kv_len(), spec.head_dim_v()]);
    assert_eq!(spec.out.shape, [batch, heads, q_len, spec.head_dim_v()]);
    assert_eq!(spec.num_kv_heads() * spec.group_size(), if heads == 0 { spec.num_kv_heads() } else { heads });
    assert!(head_dim > 0 && spec.head_dim_v() > 0);
    assert_eq!(spec.out_shape(request.q.shape.len()).numel(), rapt::Shape::from(spec.out.shape).numel());
    let pairs = spec.pairs();
    let all = [heads, q_len, spec.kv_len()].iter().fold(batch as u128, |n, &size| n.saturating_mul(size as u128));
    assert!(u128::from(pairs) <= all || pairs == u64::MAX);
    let twin = spec.clone();
    assert!(twin == *spec && hash(&twin) == hash(spec));

    match rapt::select(spec, caps) {
        Ok(plan) => {
            assert_eq!(plan, rapt::select(spec, caps).expect("planned a moment ago"), "select is a function");
            let is_empty = spec.kv_len() == 0 || spec.out.shape.contains(&0);
            assert_eq!(plan.key().kernel == Kernel::Empty, is_empty);
            assert_eq!((plan.spec() == spec, plan.cost().bytes_copied), (true, 0));
            assert!(plan.threads() >= 1 && plan.threads() <= caps.threads.max(1));
            // Decode keeps a partial row per item: fewer bytes than items is a product that wrapped.
            assert!(plan.key().kernel != Kernel::Decode || plan.workspace_bytes() >= plan.items());
        }
        Err(error) => {
            assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
            check_refusal(&error);
        }
    }
}
