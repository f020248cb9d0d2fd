//! q, k and v that are codes: every format and granularity against the reference on numbers that were dequantized first, calls
//! that were seen before, and what is refused, with nothing written.

use std::ffi::c_char;
use std::mem::offset_of;
use std::ptr::{null, null_mut};

use engine::quant::{Quantized, Scheme, quantize};
use engine::{Format, Granularity, ScaleLayout, View};
use rapt_c::rapt_error::{self, *};
use rapt_c::{
    rapt_codes, rapt_compute, rapt_device, rapt_dtype, rapt_explain, rapt_options, rapt_string_free, rapt_tensor,
};
use rapt_reference::{Inputs, Problem, naive};

use crate::support::{BEFORE, Call, DIM, HEADS, K, KV_LEN, OUT, Owned, Q, Q_LEN, V, last_error, tensor};

/// The codes of one of q, k and v, and all that stands behind their rapt_codes.
pub(crate) struct Side {
    pub(crate) quantized: Quantized,
    sizes: [i64; 4],
    steps: [i64; 4],
    pub(crate) descale: rapt_tensor,
    zero_point: rapt_tensor,
    global_scale: f32,
    pub(crate) codes: rapt_codes,
}

impl Side {
    /// Of numbers that lie row-major; boxed, because its parts lead to one another.
    fn new(x: &[f32], shape: [usize; 4], format: Format, granularity: Option<Granularity>) -> Box<Side> {
        Side::of_scheme(x, shape, Scheme::new(format, granularity, ScaleLayout::Plain).unwrap())
    }

    fn of_scheme(x: &[f32], shape: [usize; 4], scheme: Scheme) -> Box<Side> {
        let format = scheme.format();
        let quantized = quantize(&View::contiguous("x", x, shape.into()).unwrap(), scheme, None).unwrap();
        let (mut sizes, mut steps) = ([0; 4], [0; 4]);
        let of = *quantized.form().scale_shape();
        for (d, (size, step)) in of.iter().zip(of.contiguous().unwrap().iter()).enumerate() {
            (sizes[d], steps[d]) = (*size as i64, *step as i64);
        }
        let dtype = |dtype: engine::DType| i32::from(dtype.code());
        let data = quantized.scale_f32().map(|scale| scale.as_ptr().cast_mut().cast());
        let data = data.or(quantized.scale_bytes().map(|scale| scale.as_ptr().cast_mut().cast())).unwrap();
        let ndim = of.len() as i32;
        let descale = rapt_tensor {
            dtype: dtype(format.scale_dtype()),
            ndim,
            storage_bytes: (of.numel().unwrap() * format.scale_dtype().size_bytes()) as i64,
            ..tensor(data, rapt_dtype::RAPT_DTYPE_UNKNOWN)
        };
        let points = quantized.zero_point().map_or(null_mut(), |points| points.as_ptr().cast_mut().cast());
        let zero_point = rapt_tensor { ndim, ..tensor(points, rapt_dtype::RAPT_DTYPE_U8) };
        let codes = rapt_codes {
            size: size_of::<rapt_codes>(),
            format: 1 + Format::ALL.iter().position(|known| *known == format).unwrap() as i32,
            granularity: 0,
            block_size: 0,
            head_dim: 0,
            descale: null(),
            zero_point: null(),
            global_scale: null(),
            scale_layout: (scheme.scale_layout() == ScaleLayout::Swizzle32x4x4).into(),
        };
        let global_scale = quantized.global_scale().unwrap_or(0.0);
        let mut side = Box::new(Side { quantized, sizes, steps, descale, zero_point, global_scale, codes });
        for tensor in [&raw mut side.descale, &raw mut side.zero_point] {
            // SAFETY: fields of a box that lives.
            unsafe { ((*tensor).shape, (*tensor).strides) = (side.sizes.as_ptr(), side.steps.as_ptr()) };
        }
        side.codes.descale = &raw const side.descale;
        if format.has_zero_point() {
            side.codes.zero_point = &raw const side.zero_point;
        }
        if format.has_global_scale() {
            side.codes.global_scale = &raw const side.global_scale;
        }
        side
    }

    /// Of k or v of a call.
    pub(crate) fn of(call: &Call, at: usize, format: Format, granularity: Option<Granularity>) -> Box<Side> {
        let len = if at == Q { Q_LEN } else { KV_LEN };
        Side::new(&call.data[at], [1, HEADS, len, DIM], format, granularity)
    }

    /// In place of one of q, k and v.
    pub(crate) fn stand_in(&self, call: &mut Call, at: usize) {
        let form = self.quantized.form();
        call.tensors[at].data = self.quantized.codes().as_ptr().cast_mut().cast();
        call.tensors[at].dtype = i32::from(form.format().code_dtype().code());
        call.tensors[at].storage_bytes = self.quantized.codes().len() as i64;
        for (d, (size, step)) in
            form.codes_shape().iter().zip(form.codes_shape().contiguous().unwrap().iter()).enumerate()
        {
            (call.shapes[at][d], call.strides[at][d]) = (*size as i64, *step as i64);
        }
        let codes = &raw const self.codes;
        match at {
            Q => call.options.q_codes = codes,
            K => call.options.k_codes = codes,
            _ => call.options.v_codes = codes,
        }
    }

    /// As if its parts were on a GPU.
    pub(crate) fn far(&mut self) {
        let far = rapt_device::RAPT_DEVICE_CUDA as i32;
        (self.descale.device, self.zero_point.device) = (far, far);
    }

    fn numbers(&self) -> Vec<f64> {
        self.quantized.view().unwrap().to_f32().unwrap().into_iter().map(f64::from).collect()
    }
}

/// A call with no option but these codes and a scale.
pub(crate) fn plain(engine: &Owned, seed: u32) -> Box<Call> {
    let mut call = Call::new(engine, seed);
    let size = call.options.size;
    // SAFETY: zero and NULL are values of each field.
    call.options = rapt_options { size, ..unsafe { std::mem::zeroed() } };
    call
}

/// Runs the call and compares with the reference on `numbers`, those of q, k and v.
fn assert_as_dequantized(what: &str, call: &Call, [q, k, v]: [&[f64]; 3], head_dim: usize) {
    assert_eq!(call.run(), RAPT_OK, "{what}: {}", last_error());
    let problem = Problem { head_dim_v: DIM, ..Problem::plain(1, HEADS, Q_LEN, KV_LEN, head_dim) };
    let expected = naive(&problem, &Inputs { q, k, v, mask: None, sinks: None, alibi_slopes: None }).out;
    for (at, (got, expected)) in call.outputs()[0].iter().zip(&expected).enumerate() {
        let near = (f64::from(*got) - expected).abs() <= 1e-6 * (1.0 + expected.abs());
        assert!(near, "{what}: out[{at}] is {got}, the reference says {expected}");
    }
}

fn wide(data: &[f32]) -> Vec<f64> {
    data.iter().map(|x| f64::from(*x)).collect()
}

fn granularities(format: Format) -> Vec<Option<Granularity>> {
    use Granularity::{Block, Channel, Head, Tensor, Token};
    match format.own_block_size() {
        Some(_) => vec![None],
        None => [Tensor, Head, Token, Channel, Block(2)].map(Some).to_vec(),
    }
}

#[test]
fn every_format_and_granularity_gives_what_its_numbers_give() {
    let engine = Owned::new(1);
    let mut served = 0;
    for format in Format::ALL {
        for granularity in granularities(format) {
            let what = format!("{format} {granularity:?}");
            let mut call = plain(&engine, 21 + served);
            let (q, v) = (wide(&call.data[Q]), wide(&call.data[V]));
            let k = Side::of(&call, K, format, granularity);
            k.stand_in(&mut call, K);
            assert_as_dequantized(&what, &call, [&q, &k.numbers(), &v], DIM);
            let v = Side::of(&call, V, format, granularity);
            v.stand_in(&mut call, V);
            assert_as_dequantized(&what, &call, [&q, &k.numbers(), &v.numbers()], DIM);
            let first = call.outputs()[0].to_vec();
            assert_eq!((call.run(), call.outputs()[0]), (RAPT_OK, &first[..]), "{what}: seen before");

            let q = Side::of(&call, Q, format, granularity);
            q.stand_in(&mut call, Q);
            call.options.out_dtype = rapt_dtype::RAPT_DTYPE_F32 as i32;
            assert_as_dequantized(&what, &call, [&q.numbers(), &k.numbers(), &v.numbers()], DIM);
            served += 1;
        }
    }
    assert_eq!(served, 28);
}

#[test]
fn swizzled_factors_give_the_bits_of_factors_in_rows() {
    let engine = Owned::new(1);
    for (n, format) in [Format::Mxfp8, Format::Mxfp4, Format::Nvfp4].into_iter().enumerate() {
        let mut call = plain(&engine, 70 + n as u32);
        call.options.out_dtype = rapt_dtype::RAPT_DTYPE_F32 as i32;
        let [in_rows, swizzled] = [ScaleLayout::Plain, ScaleLayout::Swizzle32x4x4].map(|scale_layout| {
            let scheme = Scheme::new(format, None, scale_layout).unwrap();
            [(Q, Q_LEN), (K, KV_LEN), (V, KV_LEN)]
                .map(|(at, len)| (at, Side::of_scheme(&call.data[at], [1, HEADS, len, DIM], scheme)))
        });
        in_rows.iter().for_each(|(at, side)| side.stand_in(&mut call, *at));
        let [q, k, v] = in_rows.each_ref().map(|(_, side)| side.numbers());
        assert_as_dequantized(format.name(), &call, [&q, &k, &v], DIM);
        let expected = call.outputs()[0].to_vec();
        swizzled.iter().for_each(|(at, side)| side.stand_in(&mut call, *at));
        for _ in 0..2 {
            call.data[3].fill(BEFORE);
            assert_eq!((call.run(), call.outputs()[0]), (RAPT_OK, &expected[..]), "{format}: {}", last_error());
        }
    }
}

#[test]
fn a_layout_of_factors_is_one_of_those_that_there_are_and_a_struct_without_it_is_plain() {
    let engine = Owned::new(1);
    let mut call = plain(&engine, 80);
    let mut k = Side::of(&call, K, Format::Mxfp8, None);
    k.stand_in(&mut call, K);
    assert_eq!(call.run(), RAPT_OK, "{}", last_error());
    let expected = call.outputs()[0].to_vec();
    for (code, error, says) in [
        (2, RAPT_ERROR_OPTION, "k_codes.scale_layout = 2; allowed: RAPT_SCALE_LAYOUT_PLAIN"),
        (-1, RAPT_ERROR_OPTION, "k_codes.scale_layout = -1"),
        (1, RAPT_ERROR_SHAPE, "padded to multiples of 128"),
    ] {
        k.codes.scale_layout = code;
        call.data[3].fill(BEFORE);
        assert_eq!(call.run(), error, "{}", last_error());
        assert!(last_error().contains(says), "{}", last_error());
        assert!(call.outputs()[0].iter().all(|x| *x == BEFORE), "nothing is written");
    }
    // What lies behind the end of a smaller struct may be anything.
    (k.codes.size, k.codes.scale_layout) = (offset_of!(rapt_codes, scale_layout), 7);
    assert_eq!((call.run(), call.outputs()[0]), (RAPT_OK, &expected[..]), "{}", last_error());
}

/// Rows of three numbers in two bytes.
#[test]
fn an_odd_row_of_codes_that_share_bytes_has_its_head_dim_stated() {
    let engine = Owned::new(1);
    let mut call = plain(&engine, 2);
    let x = &call.data[K][..HEADS * KV_LEN * 3];
    let mut k = Side::new(x, [1, HEADS, KV_LEN, 3], Format::Int4, Some(Granularity::Block(2)));
    k.stand_in(&mut call, K);
    call.shapes[Q][3] = 3;
    let q: Vec<f64> = call.data[Q].chunks(DIM).flat_map(|row| wide(&row[..3])).collect();
    assert_eq!(call.run(), RAPT_ERROR_SHAPE, "{}", last_error());
    assert!(last_error().contains("k has head_dim 4, q has 3"), "{}", last_error());
    k.codes.head_dim = 3;
    assert_eq!(call.run(), RAPT_ERROR_SHAPE, "two factors do not tell the blocks of three numbers: {}", last_error());
    (k.codes.granularity, k.codes.block_size) = (5, 2);
    assert_as_dequantized("int4 of three", &call, [&q, &k.numbers(), &wide(&call.data[V])], 3);
}

#[test]
fn a_call_seen_before_reads_the_factors_that_lie_there_now() {
    let engine = Owned::new(1);
    let mut call = plain(&engine, 4);
    let (q, k) = (wide(&call.data[Q]), wide(&call.data[K]));
    let mut v = Side::of(&call, V, Format::Nvfp4, None);
    v.stand_in(&mut call, V);
    assert_as_dequantized("nvfp4", &call, [&q, &k, &v.numbers()], DIM);
    v.global_scale *= 2.0;
    let doubled: Vec<f64> = v.numbers().iter().map(|x| 2.0 * x).collect();
    assert_as_dequantized("another number behind the same pointer", &call, [&q, &k, &doubled], DIM);

    let mut call = plain(&engine, 5);
    let (q, k) = (wide(&call.data[Q]), wide(&call.data[K]));
    let mut v = Side::of(&call, V, Format::Int8, Some(Granularity::Tensor));
    let mut factor = v.quantized.scale_f32().unwrap().to_vec();
    v.descale.data = factor.as_mut_ptr().cast();
    v.stand_in(&mut call, V);
    assert_as_dequantized("int8", &call, [&q, &k, &v.numbers()], DIM);
    factor[0] *= -3.0;
    let other: Vec<f64> = v.numbers().iter().map(|x| -3.0 * x).collect();
    assert_as_dequantized("another factor", &call, [&q, &k, &other], DIM);
    // Of the two structs of a call one says another granularity: the shape of the descale must be that.
    v.codes.granularity = 3;
    assert_eq!(call.run(), RAPT_ERROR_SHAPE, "{}", last_error());
}

#[test]
fn a_struct_from_before_there_were_codes_is_served_and_its_end_is_not_read() {
    let engine = Owned::new(1);
    let mut call = plain(&engine, 6);
    assert_eq!(call.run(), RAPT_OK);
    let expected = call.outputs()[0].to_vec();
    call.data[3].fill(BEFORE);
    call.options.size = offset_of!(rapt_options, q_codes);
    // What lies behind the end of a smaller struct may be anything.
    call.options.q_codes = std::ptr::without_provenance(1);
    call.options.k_codes = std::ptr::without_provenance(3);
    assert_eq!((call.run(), call.outputs()[0]), (RAPT_OK, &expected[..]), "{}", last_error());
}

type Bend = fn(&mut Call, &mut [Box<Side>; 2]);

/// What is bent of a call with int8 keys and uint8 values, the code that answers, and what the message says.
const REFUSALS: [(&str, rapt_error, &str, Bend); 27] = [
    (
        "no codes",
        RAPT_ERROR_UNSUPPORTED_DTYPE,
        "k is int8 codes, which are no numbers without k_descale: nothing is assumed \
      in its place. Mend: point options->k_codes->descale to it",
        |call, _| call.options.k_codes = null(),
    ),
    (
        "no descale",
        RAPT_ERROR_UNSUPPORTED_DTYPE,
        "k is int8 codes, which are no numbers without k_descale",
        |_, [k, _]| {
            k.codes.descale = null();
        },
    ),
    (
        "no zero point",
        RAPT_ERROR_UNSUPPORTED_DTYPE,
        "v is uint8 codes, which are no numbers without v_zero_point: nothing \
      is assumed in its place. Mend: point options->v_codes->zero_point to it",
        |_, [_, v]| v.codes.zero_point = null(),
    ),
    ("no global scale", RAPT_ERROR_UNSUPPORTED_DTYPE, "v_global_scale", |_, [_, v]| {
        (v.codes.format, v.codes.zero_point) = (8, null());
    }),
    (
        "a zero point beside int8",
        RAPT_ERROR_OPTION,
        "k_zero_point was given, and int8 codes have none: k is such. Mend: \
      options->k_codes->zero_point = NULL",
        |_, [k, v]| k.codes.zero_point = &raw const v.zero_point,
    ),
    ("a global scale beside int8", RAPT_ERROR_OPTION, "k_global_scale was given", |_, [k, _]| {
        k.codes.global_scale = &raw const k.global_scale;
    }),
    (
        "a descale of another shape",
        RAPT_ERROR_SHAPE,
        "k_descale has shape [1, 2, 4], which scales of numbers of shape \
      [1, 2, 5, 4] do not have: allowed are [] (tensor)",
        |_, [k, _]| k.sizes[2] = 4,
    ),
    ("a descale of a negative size", RAPT_ERROR_SHAPE, "k_descale has size -1 in dimension 0", |_, [k, _]| {
        k.sizes[0] = -1;
    }),
    (
        "a descale of another dtype",
        RAPT_ERROR_DTYPE_MISMATCH,
        "k_descale has dtype float16, asked for is float32. Mend: \
      k_descale in RAPT_DTYPE_F32",
        |_, [k, _]| k.descale.dtype = rapt_dtype::RAPT_DTYPE_F16 as i32,
    ),
    (
        "a descale of a dtype that is none",
        RAPT_ERROR_UNSUPPORTED_DTYPE,
        "k_descale has a dtype that is not known: code 99",
        |_, [k, _]| k.descale.dtype = 99,
    ),
    ("a zero point of another dtype", RAPT_ERROR_DTYPE_MISMATCH, "v_zero_point has dtype int8", |_, [_, v]| {
        v.zero_point.dtype = rapt_dtype::RAPT_DTYPE_I8 as i32;
    }),
    ("a zero point of another shape", RAPT_ERROR_SHAPE, "v_zero_point has shape []", |_, [_, v]| v.zero_point.ndim = 0),
    (
        "numbers",
        RAPT_ERROR_DTYPE_MISMATCH,
        "k has dtype float32, asked for is int8. Mend: options->k_codes = NULL if k has \
      numbers, else its codes in RAPT_DTYPE_I8",
        |call, _| {
            (call.tensors[K].data, call.tensors[K].dtype) = (call.tensors[Q].data, 7);
            call.tensors[K].storage_bytes = 0;
        },
    ),
    ("codes of another dtype", RAPT_ERROR_DTYPE_MISMATCH, "k has dtype uint8, asked for is int8", |call, _| {
        call.tensors[K].dtype = rapt_dtype::RAPT_DTYPE_U8 as i32;
    }),
    (
        "no format",
        RAPT_ERROR_OPTION,
        "k_codes.format = 0; allowed: RAPT_FORMAT_INT8, RAPT_FORMAT_UINT8",
        |_, [k, _]| {
            k.codes.format = 0;
        },
    ),
    ("a format that is none", RAPT_ERROR_OPTION, "v_codes.format = 9", |_, [_, v]| v.codes.format = 9),
    (
        "a granularity that is none",
        RAPT_ERROR_OPTION,
        "k_codes.granularity = -1; allowed: RAPT_GRANULARITY_OF_SHAPE",
        |_, [k, _]| k.codes.granularity = -1,
    ),
    ("another granularity than the shape's", RAPT_ERROR_SHAPE, "k_descale has shape [1, 2, 5]", |_, [k, _]| {
        k.codes.granularity = 2;
    }),
    ("blocks of 0", RAPT_ERROR_OPTION, "k_codes.block_size = 0", |_, [k, _]| k.codes.granularity = 5),
    ("a size of blocks without blocks", RAPT_ERROR_OPTION, "k_codes.block_size = 32", |_, [k, _]| {
        k.codes.block_size = 32;
    }),
    ("blocks of -1", RAPT_ERROR_OPTION, "k_codes.block_size = -1", |_, [k, _]| {
        (k.codes.granularity, k.codes.block_size) = (5, -1);
    }),
    ("a negative head_dim", RAPT_ERROR_OPTION, "k_codes.head_dim = -4", |_, [k, _]| k.codes.head_dim = -4),
    ("another head_dim", RAPT_ERROR_SHAPE, "k has shape [1, 2, 5, 4]", |_, [k, _]| k.codes.head_dim = i64::MAX),
    ("another size of rapt_codes", RAPT_ERROR_OPTION, "k_codes.size = 48; allowed: 56", |_, [k, _]| k.codes.size = 48),
    ("codes unaligned", RAPT_ERROR_POINTER, "k_codes leads to", |call, _| {
        call.options.k_codes = call.options.k_codes.wrapping_byte_add(4);
    }),
    ("a global scale unaligned", RAPT_ERROR_POINTER, "k_codes->global_scale leads to", |_, [k, _]| {
        k.codes.global_scale = (&raw const k.global_scale).wrapping_byte_add(1);
    }),
    ("a descale past its storage", RAPT_ERROR_LAYOUT, "k_descale", |_, [k, _]| k.descale.storage_bytes = 36),
];

#[test]
fn what_is_wrong_about_codes_is_refused_and_nothing_is_written() {
    let engine = Owned::new(1);
    for seen in [false, true] {
        for (name, code, says, bend) in &REFUSALS {
            let mut call = plain(&engine, 9);
            let mut sides = [
                Side::of(&call, K, Format::Int8, Some(Granularity::Token)),
                Side::of(&call, V, Format::Uint8, Some(Granularity::Token)),
            ];
            sides[0].stand_in(&mut call, K);
            sides[1].stand_in(&mut call, V);
            if seen {
                assert_eq!(call.run(), RAPT_OK, "{}", last_error());
                call.data[3].fill(BEFORE);
            }
            let before = sides.each_ref().map(|side| side.quantized.clone());
            bend(&mut call, &mut sides);
            assert_eq!(call.run(), *code, "{name}: {}", last_error());
            assert!(last_error().contains(says), "{name}: `{}` lacks `{says}`", last_error());
            assert!(call.outputs().into_iter().flatten().all(|x| *x == BEFORE), "{name}: an output was written");
            assert_eq!(sides.each_ref().map(|side| side.quantized.clone()), before, "{name}: an input was written");
            let mut text: *mut c_char = null_mut();
            let [q, k, v, out] = call.args;
            // SAFETY: as in `Call::run`.
            let explained = unsafe { rapt_explain(call.engine, q, k, v, out, call.options_arg, &raw mut text) };
            assert_eq!((explained, text.is_null()), (*code, true), "{name}: {}", last_error());
        }
    }
    let mut call = plain(&engine, 9);
    let mut q = Side::of(&call, Q, Format::E4m3fn, Some(Granularity::Head));
    q.stand_in(&mut call, Q);
    assert_eq!(call.run(), RAPT_ERROR_OPTION);
    assert!(last_error().ends_with("Mend: options->out_dtype = RAPT_DTYPE_F32"), "{}", last_error());
    call.options.out_dtype = rapt_dtype::RAPT_DTYPE_F32 as i32;
    q.descale.data = call.tensors[OUT].data;
    assert_eq!(call.run(), RAPT_ERROR_LAYOUT);
    assert!(last_error().contains("out shares memory with q_descale"), "{}", last_error());
}

#[test]
fn explain_says_what_the_codes_are() {
    let engine = Owned::new(1);
    let mut call = plain(&engine, 3);
    let k = Side::of(&call, K, Format::Mxfp4, None);
    k.stand_in(&mut call, K);
    assert_eq!(call.tensors[K].device, rapt_device::RAPT_DEVICE_CPU as i32);
    let mut text: *mut c_char = null_mut();
    let [q, k, v, out] = call.args;
    // SAFETY: as in `Call::run`; the text is given back.
    let says = unsafe {
        assert_eq!(rapt_explain(call.engine, q, k, v, out, call.options_arg, &raw mut text), RAPT_OK);
        let says = std::ffi::CStr::from_ptr(text).to_str().unwrap().to_owned();
        rapt_string_free(text);
        says
    };
    assert!(says.contains("mxfp4 codes, a scale for each block of 32"), "{says}");
}

#[test]
fn products_of_int8_are_used_when_they_are_asked_for() {
    let engine = Owned::new(1);
    let mut call = plain(&engine, 6);
    let k = Side::of(&call, K, Format::Int8, Some(Granularity::Token));
    let v = Side::of(&call, V, Format::Int8, Some(Granularity::Channel));
    k.stand_in(&mut call, K);
    assert_eq!(call.run(), RAPT_OK, "{}", last_error());
    call.options.compute = rapt_compute::RAPT_COMPUTE_INT8 as i32;
    assert_eq!(call.run(), RAPT_ERROR_UNSUPPORTED, "v has numbers");
    assert!(last_error().contains("quantize v to int8 by tensor, head or channel"), "{}", last_error());
    v.stand_in(&mut call, V);
    call.options.compute = rapt_compute::RAPT_COMPUTE_EXACT as i32;
    assert_eq!(call.run(), RAPT_OK, "{}", last_error());
    let exact = call.outputs()[0].to_vec();
    // Seen before but for this.
    call.options.compute = rapt_compute::RAPT_COMPUTE_INT8 as i32;
    assert_eq!(call.run(), RAPT_OK, "{}", last_error());
    let approximate = call.outputs()[0].to_vec();
    let off = exact.iter().zip(&approximate).map(|(a, b)| (a - b).powi(2)).sum::<f32>().sqrt();
    let size = exact.iter().map(|x| x.powi(2)).sum::<f32>().sqrt();
    assert!(off > 0.0 && off < 0.03 * size, "{off} of {size}");
    // Of a header that has no such field.
    call.options.size = offset_of!(rapt_options, compute);
    assert_eq!((call.run(), call.outputs()[0]), (RAPT_OK, &exact[..]), "{}", last_error());
    call.options.size = size_of::<rapt_options>();
    for (code, answer) in [(2, RAPT_ERROR_UNSUPPORTED), (3, RAPT_ERROR_OPTION), (-1, RAPT_ERROR_OPTION)] {
        call.options.compute = code;
        assert_eq!(call.run(), answer, "{code}: {}", last_error());
        assert!(last_error().contains("compute"), "{}", last_error());
    }
}
