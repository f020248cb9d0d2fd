//! A request with its outputs, at addresses that are never followed: what explain and the certificate say of it.

use arbitrary::{Result as Parsed, Unstructured};
use rapt::{Caps, Certificate, Device, Extent, Operands, Plan, Result, Spec, Tensors, ViewMut};

use crate::arbitrary::{Request, Scale, TensorDesc, once_in};
use crate::check_refusal;
use crate::spec::{SOMEWHERE, caps, unread};

/// Whether the bytes describe a request that is planned and certified.
///
/// # Panics
/// If explain leaves something out, or says what is not so.
#[must_use]
pub fn explain(data: &[u8]) -> bool {
    let mut u = Unstructured::new(data);
    let Ok((request, at, caps)) = parse(&mut u) else { return false };
    match certify(&request, at, &caps) {
        Ok((plan, certificate)) => {
            check(&plan, &certificate);
            true
        }
        Err(error) => {
            check_refusal(&error);
            false
        }
    }
}

/// Addresses of q, k, v, mask, sinks, slopes, out and lse.
type Addresses = [usize; 8];

fn parse(u: &mut Unstructured<'_>) -> Parsed<(Request, Addresses, Caps)> {
    let scale = if once_in(u, 8)? { Scale::Any } else { Scale::Small };
    let request = Request::new(u, scale)?;
    // Far apart, and now and then near one another.
    let mut at: Addresses = std::array::from_fn(|n| (SOMEWHERE >> 8) * (n + 1));
    for address in &mut at {
        if once_in(u, 8)? {
            *address = SOMEWHERE + 8 * usize::from(u.arbitrary::<u8>()?);
        }
    }
    Ok((request, at, caps(u)?))
}

fn unread_out(tensor: &'static str, desc: &TensorDesc, address: usize) -> Result<ViewMut<'static>> {
    let ptr = std::ptr::without_provenance_mut(address);
    let TensorDesc { dtype, shape, strides } = *desc;
    // SAFETY: nothing is ever written through it: no plan is run here.
    unsafe { ViewMut::from_raw_parts(tensor, ptr, dtype, shape, strides, Device::Cpu, Extent::Declared) }
}

fn certify(request: &Request, at: Addresses, caps: &Caps) -> Result<(Plan, Certificate)> {
    let optional = |tensor, desc: &Option<TensorDesc>, address| {
        desc.as_ref().map(|desc| unread(tensor, desc, address)).transpose()
    };
    let tensors = Tensors {
        mask: optional("mask", &request.mask, at[3])?,
        sinks: optional("sinks", &request.sinks, at[4])?,
        alibi_slopes: optional("alibi_slopes", &request.alibi_slopes, at[5])?,
        lse: request.lse.as_ref().map(|lse| unread_out("lse", lse, at[7])).transpose()?,
        ..Tensors::new(
            unread("q", &request.q, at[0])?,
            unread("k", &request.k, at[1])?,
            unread("v", &request.v, at[2])?,
            unread_out("out", &request.out, at[6])?,
        )
    };
    let spec = spec_of(&tensors, request)?;
    let plan = rapt::select(&spec, caps)?;
    let certificate = plan.certificate(&Operands::check(tensors, &spec)?)?;
    Ok((plan, certificate))
}

/// The spec of these tensors.
pub(crate) fn spec_of(tensors: &Tensors<'_>, request: &Request) -> Result<Spec> {
    let Tensors { q, k, v, out, .. } = tensors;
    let mut builder = Spec::builder(q, k, v, &request.options);
    builder
        .mask(tensors.mask.as_ref())
        .sinks(tensors.sinks.as_ref())
        .alibi_slopes(tensors.alibi_slopes.as_ref())
        .out(out);
    if let Some(lse) = &tensors.lse {
        builder.lse(lse);
    }
    builder.build()
}

const ROWS: [&str; 18] = [
    "kernel",
    "why",
    "problem",
    "q strides",
    "k strides",
    "v strides",
    "out strides",
    "positions",
    "mask",
    "accumulation",
    "p is rounded",
    "tiles",
    "threads",
    "flops",
    "bytes read",
    "floor",
    "bytes_copied",
    "workspace_bytes",
];

fn check(plan: &Plan, certificate: &Certificate) {
    let explanation = plan.explain().certified(certificate);
    let (rows, text) = (explanation.rows(), explanation.to_string());
    for (name, said) in &rows {
        assert!(!said.is_empty(), "{name} says nothing");
        assert!(!said.contains("NaN") && !said.contains("inf "), "{name}: {said}");
    }
    for name in ROWS {
        assert!(rows.iter().any(|(row, _)| *row == name), "{name} is missing");
    }
    assert_eq!(text.lines().count(), rows.len());
    let operands = certificate.in_bounds.len();
    let outputs = certificate.injective.len();
    let said = |row: &str| rows.iter().filter(|(name, _)| *name == row).count();
    assert_eq!(
        (said("in bounds"), said("injective"), said("disjoint"), said("coverage")),
        (operands, outputs, outputs, 1)
    );
    assert!(!certificate.is_proven(), "nothing here is known of any storage");
    assert!(certificate.in_bounds.iter().all(|fact| fact.bytes.0 <= 0 && fact.bytes.1 >= fact.bytes.0));
    // Each output with each input, and the two outputs with one another.
    assert_eq!(certificate.disjoint.len(), (operands - outputs) * outputs + outputs - 1);
    let rows_of_out: u128 = plan.spec().out.shape[..3].iter().map(|&n| n as u128).product();
    assert_eq!(certificate.coverage.rows, rows_of_out);
}
