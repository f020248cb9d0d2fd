//! What `compute` is served with, and what each refusal says.

use rapt_core::{CodesForm, Compute, DType, Device, Error, ErrorKind, Format, Options, Qkv, Shape, Spec, TensorForm};

const Q: [usize; 4] = [2, 6, 5, 12];
const KV: [usize; 4] = [2, 3, 7, 12];

fn form(dtype: DType, shape: &[usize]) -> TensorForm {
    let shape = Shape::new(shape).unwrap();
    TensorForm::new(dtype, shape, shape.contiguous().unwrap(), Device::Cpu)
}

/// Codes of a format with a descale of this shape.
fn codes(format: Format, descale: &[usize]) -> Option<CodesForm> {
    Some(CodesForm::new(format, form(DType::F32, descale)))
}

fn build(compute: Compute, q: DType, of: Qkv<Option<CodesForm>>) -> Result<Spec, Error> {
    let tensor = |codes: &Option<CodesForm>, shape: [usize; 4]| {
        form(codes.as_ref().map_or(q, |codes| codes.format.code_dtype()), &shape)
    };
    let options = Options { out_dtype: of.q.map(|_| DType::F32), ..Options::default().with_compute(compute) };
    Spec::builder(tensor(&of.q, Q), tensor(&of.k, KV), tensor(&of.v, KV), &options).codes(of).build()
}

#[test]
fn int8_takes_int8_codes_whose_factors_stay_out_of_the_sums() {
    for q in [DType::F32, DType::F16, DType::BF16] {
        for k in [&[][..], &[2, 3], &[2, 3, 7]] {
            for v in [&[][..], &[2, 3], &[2, 3, 1, 12]] {
                let of = Qkv { q: None, k: codes(Format::Int8, k), v: codes(Format::Int8, v) };
                let spec = build(Compute::Int8, q, of).unwrap_or_else(|error| panic!("{q} {k:?} {v:?}: {error}"));
                assert_eq!(spec.compute, Compute::Int8);
                assert_ne!(spec, build(Compute::Exact, q, of).unwrap());
            }
        }
    }
}

#[test]
fn what_is_not_served_is_refused_by_name_with_a_hint() {
    let k = codes(Format::Int8, &[2, 3, 7]);
    let v = codes(Format::Int8, &[2, 3, 1, 12]);
    let of = |q, k, v| Qkv { q, k, v };
    let rows = [
        (Compute::Fp8, DType::F32, of(None, None, None), "compute=\"fp8\" on cpu", "leave compute at \"exact\""),
        (Compute::Fp8, DType::BF16, of(None, k, v), "compute=\"fp8\" on cpu", "leave compute at \"exact\""),
        (Compute::Int8, DType::F32, of(k, k, v), "with q of int8 codes", "give q as numbers"),
        (
            Compute::Int8,
            DType::F32,
            of(None, None, v),
            "with k that is no codes",
            "quantize k to int8 by tensor, head or token",
        ),
        (
            Compute::Int8,
            DType::BF16,
            of(None, k, None),
            "with v that is no codes",
            "quantize v to int8 by tensor, head or channel",
        ),
        (
            Compute::Int8,
            DType::F32,
            of(None, codes(Format::E4m3fn, &[2, 3, 7]), v),
            "with k of e4m3fn codes",
            "quantize k to int8",
        ),
        (
            Compute::Int8,
            DType::F32,
            of(None, codes(Format::Int8, &[2, 3, 1, 12]), v),
            "with k of int8 codes by channel",
            "quantize k to int8 by tensor, head or token",
        ),
        (
            Compute::Int8,
            DType::F16,
            of(None, codes(Format::Int8, &[2, 3, 7, 3]), v),
            "with k of int8 codes by block 4",
            "quantize k to int8 by tensor, head or token",
        ),
        (
            Compute::Int8,
            DType::F32,
            of(None, k, k),
            "with v of int8 codes by token",
            "quantize v to int8 by tensor, head or channel",
        ),
        (Compute::Int8, DType::F64, of(None, k, v), "q in float64 with k of int8 codes", "give q in float32"),
        (Compute::Int8, DType::F64, of(None, None, None), "with k that is no codes", "quantize k to int8"),
    ];
    for (compute, q, of, what, instead) in rows {
        // Descales of q have its own heads.
        let of = Qkv { q: of.q.map(|_| CodesForm::new(Format::Int8, form(DType::F32, &[]))), ..of };
        let error = build(compute, q, of).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.to_string().contains(what) && error.to_string().contains(instead), "{error}");
    }
}

#[test]
fn sums_stay_within_32_bits() {
    let build = |dim: usize| {
        let (q, kv) = (form(DType::F32, &[1, dim]), form(DType::I8, &[1, dim]));
        let scale = codes(Format::Int8, &[]);
        Spec::builder(q, kv, kv, &Options::default().with_compute(Compute::Int8))
            .codes(Qkv { q: None, k: scale, v: scale })
            .build()
    };
    assert!(build(1 << 17).is_ok());
    let error = build((1 << 17) + 1).unwrap_err();
    assert!(error.to_string().contains("compute=\"int8\" with head_dim 131073"), "{error}");
}

#[test]
fn names_are_read_as_they_are_written() {
    assert_eq!(Compute::ALL.map(|compute| Compute::from_name(compute.name())), Compute::ALL.map(Some));
    assert_eq!((Compute::default(), Compute::from_name("INT8")), (Compute::Exact, None));
}
