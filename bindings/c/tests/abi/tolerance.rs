//! A tolerance: the bits of heads that stand and of those that fall back, what is judged, and what is refused with nothing written.

use std::ffi::c_char;
use std::mem::offset_of;
use std::ptr::{null, null_mut};

use engine::quant::measure;
use engine::{Backing, Engine, Errors, Format, Granularity, Options, Qkv, Tensors, Tolerance, View, ViewMut};
use rapt_c::rapt_error::{self, *};
use rapt_c::{
    rapt_device, rapt_dtype, rapt_explain, rapt_judgement, rapt_measured, rapt_measured_create, rapt_measured_destroy,
    rapt_options, rapt_string_free, rapt_tensor, rapt_tolerance, rapt_varlen_attention,
};

use crate::quantized::{Side, plain};
use crate::support::{BEFORE, Call, DIM, HEADS, K, KV_LEN, LSE, Owned, Q, Q_LEN, V, last_error};

/// Elements of a head of q.
const OF_HEAD: usize = Q_LEN * DIM;
/// The limit that the first head of a [`Case`] meets and the second does not.
const LIMIT: f64 = 0.2;

/// A call on int8 keys and uint8 values, with all that stands behind its tolerance.
struct Case {
    call: Box<Call>,
    /// Those of k and v as numbers.
    originals: [rapt_tensor; 2],
    sides: [Box<Side>; 2],
    measured: [*mut rapt_measured; 2],
    tolerance: Box<rapt_tolerance>,
    judgement: Box<rapt_judgement>,
}

fn unjudged() -> rapt_judgement {
    let size = size_of::<rapt_judgement>();
    rapt_judgement { size, quantized: 99, fell_back: 99, worst_estimate: -1.0, worst_bound: -1.0, worst_epsilon: -1.0 }
}

impl Case {
    fn new(engine: &Owned) -> Case {
        let mut call = plain(engine, 31);
        // A head that tells keys apart by little.
        call.data[Q][OF_HEAD..].iter_mut().for_each(|x| *x *= 300.0);
        call.options.lse = &raw const call.tensors[LSE];
        let originals = [call.tensors[K], call.tensors[V]];
        let sides = [(K, Format::Int8), (V, Format::Uint8)]
            .map(|(at, format)| Side::of(&call, at, format, Some(Granularity::Token)));
        let mut measured = [null_mut(); 2];
        for (at, side) in sides.iter().enumerate() {
            // The tensor of codes has the shape of the original, whose arrays the call keeps.
            let mut tensor = originals[at];
            tensor.data = side.quantized.codes().as_ptr().cast_mut().cast();
            tensor.dtype = i32::from(side.quantized.form().format().code_dtype().code());
            // SAFETY: all of these live.
            let made = unsafe {
                rapt_measured_create(
                    &raw const originals[at],
                    &raw const tensor,
                    &raw const side.codes,
                    &raw mut measured[at],
                )
            };
            assert_eq!(made, RAPT_OK, "{}", last_error());
        }
        sides[0].stand_in(&mut call, K);
        sides[1].stand_in(&mut call, V);
        let mut judgement = Box::new(unjudged());
        let tolerance = Box::new(rapt_tolerance {
            size: size_of::<rapt_tolerance>(),
            limit: LIMIT,
            k_measured: measured[0],
            v_measured: measured[1],
            k_original: null(),
            v_original: null(),
            judgement: &raw mut *judgement,
        });
        call.options.tolerance = &raw const *tolerance;
        Case { call, originals, sides, measured, tolerance, judgement }
    }

    fn with_originals(mut self: Box<Self>) -> Box<Self> {
        self.tolerance.k_original = &raw const self.originals[0];
        self.tolerance.v_original = &raw const self.originals[1];
        self
    }

    /// What a call without a tolerance gives, on the codes or on the originals.
    fn plain(&mut self, on_codes: bool) -> [Vec<f32>; 2] {
        let (options, tensors) = (self.call.options, self.call.tensors);
        self.call.options.tolerance = null();
        if !on_codes {
            (self.call.options.k_codes, self.call.options.v_codes) = (null(), null());
            (self.call.tensors[K], self.call.tensors[V]) = (self.originals[0], self.originals[1]);
        }
        assert_eq!(self.call.run(), RAPT_OK, "{}", last_error());
        (self.call.options, self.call.tensors) = (options, tensors);
        self.call.outputs().map(<[f32]>::to_vec)
    }

    fn clear(&mut self) {
        [3, 6].into_iter().for_each(|at| self.call.data[at].fill(BEFORE));
        *self.judgement = unjudged();
    }

    fn is_untouched(&self) -> bool {
        self.call.outputs().into_iter().flatten().all(|x| *x == BEFORE) && self.judgement.quantized == 99
    }

    /// What the engine finds by itself.
    fn judged(&self, limit: f64) -> engine::Judgement {
        let shape = |len| [1, HEADS, len, DIM].into();
        let view = |name, at: usize, len| View::contiguous(name, &self.call.data[at], shape(len)).unwrap();
        let [k, v] = self.sides.each_ref().map(|side| side.quantized.view().unwrap());
        let (of_k, of_v) = (measure(&view("k", K, KV_LEN), &k).unwrap(), measure(&view("v", V, KV_LEN), &v).unwrap());
        let mut out = vec![0f32; HEADS * OF_HEAD];
        let to = ViewMut::contiguous("out", &mut out, shape(Q_LEN)).unwrap();
        let codes = Qkv { q: None, k: Some(Box::new(k.codes())), v: Some(Box::new(v.codes())) };
        let tensors = Tensors { codes, ..Tensors::new(view("q", Q, Q_LEN), k.tensor(), v.tensor(), to) };
        let backing = |errors| Some(Backing { errors: Errors::Host(errors), original: None });
        let tolerance = Tolerance { limit, k: backing(&of_k), v: backing(&of_v) };
        Engine::new(Some(1)).unwrap().judge(tensors, &Options::default(), &tolerance).unwrap()
    }

    fn explain(&self) -> Result<String, rapt_error> {
        let mut text: *mut c_char = null_mut();
        let [q, k, v, out] = self.call.args;
        // SAFETY: as in `Call::run`; the text is given back.
        unsafe {
            match rapt_explain(self.call.engine, q, k, v, out, self.call.options_arg, &raw mut text) {
                RAPT_OK => {
                    let says = std::ffi::CStr::from_ptr(text).to_str().unwrap().to_owned();
                    rapt_string_free(text);
                    Ok(says)
                }
                error => {
                    assert!(text.is_null());
                    Err(error)
                }
            }
        }
    }
}

impl Drop for Case {
    fn drop(&mut self) {
        // SAFETY: made in `new`, and used no more.
        self.measured.iter().for_each(|measured| unsafe { rapt_measured_destroy(*measured) });
    }
}

#[test]
fn heads_have_the_bits_of_plain_calls_and_the_judgement_is_the_engines() {
    let engine = Owned::new(1);
    let mut case = Box::new(Case::new(&engine)).with_originals();
    let (on_codes, on_originals) = (case.plain(true), case.plain(false));
    assert!(
        on_codes[0][OF_HEAD..] != on_originals[0][OF_HEAD..] && on_codes[0][..OF_HEAD] != on_originals[0][..OF_HEAD]
    );
    // Twice, and behind a call of the same structs that was kept: heads are judged each time.
    for _ in 0..2 {
        case.clear();
        assert_eq!(case.call.run(), RAPT_OK, "{}", last_error());
        let expected = case.judged(LIMIT);
        assert_eq!(expected.heads.iter().map(|head| head.is_quantized).collect::<Vec<_>>(), [true, false]);
        let [out, lse] = case.call.outputs();
        assert_eq!(out[..OF_HEAD], on_codes[0][..OF_HEAD]);
        assert_eq!(out[OF_HEAD..], on_originals[0][OF_HEAD..]);
        assert_eq!([&lse[..Q_LEN], &lse[Q_LEN..]], [&on_codes[1][..Q_LEN], &on_originals[1][Q_LEN..]]);
        let rapt_judgement { size, quantized, fell_back, worst_estimate, worst_bound, worst_epsilon } = *case.judgement;
        assert_eq!((size, quantized, fell_back), (size_of::<rapt_judgement>(), 1, 1));
        assert_eq!(worst_estimate, expected.worst_estimate());
        assert_eq!((worst_bound, worst_epsilon), (expected.worst_bound(), expected.worst_epsilon()));
        assert!(worst_estimate > LIMIT || worst_epsilon >= 1.0);
    }
    // Other numbers behind the same pointers.
    case.call.data[Q][OF_HEAD..].iter_mut().for_each(|x| *x /= 300.0);
    case.clear();
    assert_eq!((case.call.run(), case.judgement.quantized), (RAPT_OK, 2), "{}", last_error());
    let out = case.call.outputs()[0].to_vec();
    assert_eq!(out, case.plain(true)[0]);
    case.tolerance.limit = 1e-7;
    assert_eq!((case.call.run(), case.judgement.fell_back), (RAPT_OK, 2), "{}", last_error());
    let out = case.call.outputs()[0].to_vec();
    assert_eq!(out, case.plain(false)[0]);
    // It need not be asked what came of it.
    case.tolerance.judgement = null_mut();
    assert_eq!(case.call.run(), RAPT_OK, "{}", last_error());
}

#[test]
fn explain_judges_and_computes_nothing() {
    let engine = Owned::new(1);
    for has_originals in [false, true] {
        let mut case = Box::new(Case::new(&engine));
        case = if has_originals { case.with_originals() } else { case };
        let says = case.explain().unwrap();
        assert!(says.contains("tolerance: 2e-1 (relative L2); heads on the codes 1, on the originals 1"), "{says}");
        assert!(says.contains("worst estimate") && says.contains("rigorous bound"), "{says}");
        assert_eq!((case.judgement.quantized, case.judgement.fell_back), (1, 1));
        assert!(case.call.outputs().into_iter().flatten().all(|x| *x == BEFORE), "nothing is computed");
        case.call.options.tolerance = null();
        assert!(!case.explain().unwrap().contains("tolerance"));
    }
}

#[test]
fn without_originals_the_head_is_named_and_nothing_is_written() {
    let engine = Owned::new(1);
    let mut case = Box::new(Case::new(&engine));
    assert_eq!(case.call.run(), RAPT_ERROR_NUMBER, "{}", last_error());
    let says = last_error();
    assert!(says.starts_with("head 1 of batch 0 may be off by") && says.contains("tolerance->k_original"), "{says}");
    assert!(case.is_untouched());
    // One of the two is not enough.
    case.tolerance.v_original = &raw const case.originals[1];
    assert_eq!((case.call.run(), case.is_untouched()), (RAPT_ERROR_NUMBER, true));
    // What stands needs none.
    case.call.data[Q][OF_HEAD..].fill(0.01);
    assert_eq!((case.call.run(), case.judgement.quantized), (RAPT_OK, 2), "{}", last_error());
}

#[test]
fn a_struct_from_before_there_was_a_tolerance_is_served_and_its_end_is_not_read() {
    let engine = Owned::new(1);
    let mut case = Box::new(Case::new(&engine));
    let expected = case.plain(true);
    case.clear();
    case.call.options.size = offset_of!(rapt_options, tolerance);
    case.call.options.tolerance = std::ptr::without_provenance(1);
    assert_eq!((case.call.run(), case.call.outputs()[0]), (RAPT_OK, &expected[0][..]), "{}", last_error());
}

type Bend = fn(&mut Case);

/// What is bent of a [`Case`] with originals, the code that answers, and what the message says.
const REFUSALS: [(&str, rapt_error, &str, Bend); 19] = [
    ("0", RAPT_ERROR_OPTION, "tolerance = 0; allowed: None, or a finite number above 0", |case| {
        case.tolerance.limit = 0.0;
    }),
    ("-1", RAPT_ERROR_OPTION, "tolerance = -1", |case| case.tolerance.limit = -1.0),
    ("NaN", RAPT_ERROR_OPTION, "tolerance = NaN", |case| case.tolerance.limit = f64::NAN),
    ("inf", RAPT_ERROR_OPTION, "tolerance = inf", |case| case.tolerance.limit = f64::INFINITY),
    ("k not measured", RAPT_ERROR_OPTION, "k carries no measured errors", |case| {
        (case.tolerance.k_measured, case.tolerance.k_original) = (null(), null());
    }),
    ("v not measured", RAPT_ERROR_OPTION, "v carries no measured errors", |case| {
        (case.tolerance.v_measured, case.tolerance.v_original) = (null(), null());
    }),
    ("numbers", RAPT_ERROR_OPTION, "neither k nor v is quantized", |case| {
        (case.call.options.k_codes, case.call.options.v_codes) = (null(), null());
        (case.call.tensors[K], case.call.tensors[V]) = (case.originals[0], case.originals[1]);
    }),
    ("numbers beside what was measured", RAPT_ERROR_OPTION, "no measured errors of v, which has numbers", |case| {
        case.call.options.v_codes = null();
        case.call.tensors[V] = case.originals[1];
    }),
    (
        "an original without what was measured",
        RAPT_ERROR_OPTION,
        "k_original = a tensor; allowed: NULL, or k_measured",
        |case| {
            case.tolerance.k_measured = null();
        },
    ),
    ("unaligned", RAPT_ERROR_POINTER, "tolerance leads to", |case| {
        case.call.options.tolerance = case.call.options.tolerance.wrapping_byte_add(4);
    }),
    ("another size", RAPT_ERROR_OPTION, "tolerance.size = 48; allowed: 56", |case| case.tolerance.size = 48),
    ("measured unaligned", RAPT_ERROR_POINTER, "tolerance->k_measured leads to", |case| {
        case.tolerance.k_measured = case.tolerance.k_measured.wrapping_byte_add(1);
    }),
    ("a judgement unaligned", RAPT_ERROR_POINTER, "tolerance->judgement leads to", |case| {
        case.tolerance.judgement = case.tolerance.judgement.wrapping_byte_add(1);
    }),
    ("a judgement of another size", RAPT_ERROR_OPTION, "judgement.size = 8; allowed: 48", |case| {
        case.judgement.size = 8;
    }),
    ("an original of another dtype", RAPT_ERROR_DTYPE_MISMATCH, "k has dtype float16", |case| {
        case.originals[0].dtype = rapt_dtype::RAPT_DTYPE_F16 as i32;
    }),
    ("an original without data", RAPT_ERROR_LAYOUT, "v", |case| case.originals[1].data = null_mut()),
    ("an original in the output", RAPT_ERROR_LAYOUT, "out shares memory with k", |case| {
        // Though every head stands.
        case.call.data[Q].fill(0.01);
        case.originals[0].data = case.call.tensors[3].data;
    }),
    ("another layout", RAPT_ERROR_UNSUPPORTED, "tolerance with layout 'bshd'", |case| {
        // Heads and rows are as many, so that it is a request.
        (case.call.options.layout, case.call.options.lse) = (1, null());
        for (at, sizes) in [(Q, [1, 3, 2, 4]), (3, [1, 3, 2, 4])] {
            case.call.shapes[at][..4].copy_from_slice(&sizes);
        }
        (case.call.options.k_codes, case.call.options.v_codes) = (null(), null());
        (case.call.tensors[K], case.call.tensors[V]) = (case.call.tensors[Q], case.call.tensors[Q]);
    }),
    ("a GPU", RAPT_ERROR_UNSUPPORTED, "tolerance on a GPU", |case| {
        case.call.options.lse = null();
        let far = rapt_device::RAPT_DEVICE_CUDA as i32;
        [Q, K, V, 3].into_iter().for_each(|at| case.call.tensors[at].device = far);
        case.sides.iter_mut().for_each(|side| side.far());
    }),
];

#[test]
fn what_cannot_be_judged_is_refused_and_nothing_is_written() {
    let engine = Owned::new(1);
    for (name, code, says, bend) in &REFUSALS {
        let mut case = Box::new(Case::new(&engine)).with_originals();
        bend(&mut case);
        for explained in [false, true] {
            let got = if explained { case.explain().err() } else { Some(case.call.run()) };
            assert_eq!(got, Some(*code), "{name}: {}", last_error());
            assert!(last_error().contains(says), "{name}: `{}` lacks `{says}`", last_error());
            assert!(case.is_untouched(), "{name}: something was written");
        }
    }
}

#[test]
fn sequences_of_different_lengths_have_none() {
    let engine = Owned::new(1);
    let case = Box::new(Case::new(&engine));
    let [q, k, v, out] = case.call.args;
    // SAFETY: as in `Call::run`; the tensors that are asked before the options are there.
    let refused = unsafe { rapt_varlen_attention(case.call.engine, q, k, v, q, q, out, case.call.options_arg) };
    assert_eq!(refused, RAPT_ERROR_UNSUPPORTED, "{}", last_error());
    assert!(last_error().contains("a tolerance with sequences of different lengths"), "{}", last_error());
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let engine = Owned::new(1);
    let case = Box::new(Case::new(&engine));
    let (x, side) = (case.originals[0], &case.sides[0]);
    let codes = case.call.tensors[K];
    let mut measured: *mut rapt_measured = null_mut();
    let mut create = |x: *const rapt_tensor, tensor: *const rapt_tensor, how: *const rapt_c::rapt_codes| {
        // SAFETY: what is not NULL lives.
        let made = unsafe { rapt_measured_create(x, tensor, how, &raw mut measured) };
        assert!(measured.is_null(), "nothing is made");
        made
    };
    let how = &raw const side.codes;
    for (answer, says) in [
        (create(null(), &raw const codes, how), "x is NULL"),
        (create(&raw const x, null(), how), "tensor is NULL"),
        (create(&raw const x, &raw const codes, null()), "codes is NULL"),
    ] {
        assert_eq!(answer, RAPT_ERROR_POINTER, "{says}");
    }
    let far = rapt_tensor { device: rapt_device::RAPT_DEVICE_CUDA as i32, ..x };
    assert_eq!(create(&raw const far, &raw const codes, how), RAPT_ERROR_DEVICE);
    assert!(last_error().contains("errors are measured in host memory"), "{}", last_error());
    let (short_shape, numbers) = ([1, 2, 4, 4], rapt_tensor { dtype: 9, ..x });
    let short = rapt_tensor { shape: short_shape.as_ptr(), ..x };
    assert_eq!(create(&raw const short, &raw const codes, how), RAPT_ERROR_SHAPE, "{}", last_error());
    assert_eq!(create(&raw const x, &raw const x, how), RAPT_ERROR_DTYPE_MISMATCH, "{}", last_error());
    assert_ne!(create(&raw const numbers, &raw const codes, how), RAPT_OK, "{}", last_error());
    let stated = rapt_c::rapt_codes { head_dim: 5, ..side.codes };
    assert_eq!(create(&raw const x, &raw const codes, &raw const stated), RAPT_ERROR_OPTION, "{}", last_error());
    assert!(last_error().contains("codes.head_dim = 5"), "{}", last_error());
    // SAFETY: NULL is safe everywhere.
    unsafe {
        assert_eq!(rapt_measured_create(&raw const x, &raw const codes, how, null_mut()), RAPT_ERROR_POINTER);
        rapt_measured_destroy(null_mut());
    }
}
