//! Reading what a view names, whatever its dtype and strides, and asking the reference about it.

use rapt_core::{Codes, CodesSpec, DType, Granularity, Spec, TensorLayout, Tensors, View, ViewMut};
use rapt_reference::{Descale, Inputs, Int8Inputs, Int8Outputs, Mask, Outputs, Problem, int8, naive};

use crate::buffer::element_offsets;
use crate::quantized::numbers;
use crate::scalar::{decode, encode};

/// Every element in row-major order, exactly.
///
/// # Panics
/// If the view has more than four dimensions, or a dtype that is neither computed nor bool.
#[must_use]
pub fn gather(view: &View<'_>) -> Vec<f64> {
    let rank = view.shape().len();
    let (mut shape, mut strides) = ([1; 4], [0; 4]);
    shape[4 - rank..].copy_from_slice(view.shape());
    strides[4 - rank..].copy_from_slice(view.strides());
    read(view, shape, strides)
}

/// Reads `view` under sizes and strides that are a permutation or a broadcast of its own.
fn read(view: &View<'_>, shape: [usize; 4], strides: [isize; 4]) -> Vec<f64> {
    let size = view.dtype().size_bytes();
    let element = |at: isize| {
        // SAFETY: the element lies within the view's sizes (callers only permute or repeat them), and a View's invariant
        // is that each such address holds an element of its dtype; every byte of it is initialised.
        let bytes = unsafe { std::slice::from_raw_parts(view.as_ptr().offset(at * size as isize), size) };
        decode(view.dtype(), bytes)
    };
    element_offsets(shape, strides).into_iter().map(element).collect()
}

/// q, k or v in canonical order: the same addresses, walked as `[batch, heads, len, dim]`.
fn canonical(view: &View<'_>, layout: TensorLayout) -> Vec<f64> {
    let rank = view.shape().len();
    let (mut shape, mut strides) = ([1; 4], [0; 4]);
    shape[4 - rank..].copy_from_slice(view.shape());
    strides[4 - rank..].copy_from_slice(view.strides());
    if layout == TensorLayout::Bshd && rank >= 3 {
        shape.swap(1, 2);
        strides.swap(1, 2);
    }
    read(view, shape, strides)
}

/// The numbers of q, k or v, of `shape`.
fn operand(view: &View<'_>, codes: Option<&Codes<'_>>, shape: [usize; 4], layout: TensorLayout) -> Vec<f64> {
    let stored = canonical(view, layout);
    let Some(codes) = codes else { return stored };
    let (descale, points) = (gather(&codes.descale), codes.zero_point.as_ref().map(gather));
    numbers(&stored, codes, (&descale, points.as_deref()), shape, view.shape().len(), layout)
}

/// The mask, repeated to `target`.
fn broadcast(mask: &View<'_>, target: [usize; 4]) -> Vec<f64> {
    let missing = 4 - mask.shape().len();
    let mut strides = [0; 4];
    for (d, (&n, &stride)) in mask.shape().iter().zip(mask.strides().iter()).enumerate() {
        assert!(n == 1 || n == target[missing + d], "mask {} does not broadcast to {target:?}", mask.shape());
        strides[missing + d] = if n == 1 { 0 } else { stride };
    }
    read(mask, target, strides)
}

/// The inputs of one problem in f64, as the reference takes them.
#[derive(Clone, Debug)]
pub struct Gathered {
    /// Sizes and options.
    pub problem: Problem,
    /// Queries.
    pub q: Vec<f64>,
    /// Keys.
    pub k: Vec<f64>,
    /// Values.
    pub v: Vec<f64>,
    /// A boolean mask.
    pub bools: Option<Vec<bool>>,
    /// An additive mask.
    pub bias: Option<Vec<f64>>,
    /// Sinks.
    pub sinks: Option<Vec<f64>>,
    /// ALiBi slopes.
    pub alibi_slopes: Option<Vec<f64>>,
}

impl Gathered {
    /// Reads the inputs of `tensors`; the outputs are not looked at.
    ///
    /// # Panics
    /// If the tensors are not those of `spec`.
    #[must_use]
    pub fn new(spec: &Spec, tensors: &Tensors<'_>) -> Self {
        let problem = Problem {
            batch: spec.batch(),
            num_q_heads: spec.num_q_heads(),
            num_kv_heads: spec.num_kv_heads(),
            q_len: spec.q_len(),
            kv_len: spec.kv_len(),
            head_dim: spec.head_dim(),
            head_dim_v: spec.head_dim_v(),
            softmax_scale: spec.softmax_scale.get(),
            softcap: spec.softcap.map(rapt_core::Finite::get),
            causal: spec.causal,
            window: spec.window,
            dropout: spec.dropout.zip(tensors.dropout),
        };
        let target = [problem.batch, problem.num_q_heads, problem.q_len, problem.kv_len];
        let mask = tensors.mask.as_ref().map(|mask| (mask.dtype(), broadcast(mask, target)));
        let (bools, bias) = match mask {
            Some((DType::Bool, mask)) => (Some(mask.into_iter().map(|x| x != 0.0).collect()), None),
            Some((_, mask)) => (None, Some(mask)),
            None => (None, None),
        };
        Gathered {
            problem,
            q: operand(&tensors.q, tensors.codes.q.as_deref(), spec.q.shape, spec.layout),
            k: operand(&tensors.k, tensors.codes.k.as_deref(), spec.k.shape, spec.layout),
            v: operand(&tensors.v, tensors.codes.v.as_deref(), spec.v.shape, spec.layout),
            bools,
            bias,
            sinks: tensors.sinks.as_ref().map(gather),
            alibi_slopes: tensors.alibi_slopes.as_ref().map(gather),
        }
    }

    /// As the reference takes them.
    #[must_use]
    pub fn inputs(&self) -> Inputs<'_> {
        let bools = self.bools.as_deref().map(Mask::Bool);
        Inputs {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            mask: bools.or(self.bias.as_deref().map(Mask::Additive)),
            sinks: self.sinks.as_deref(),
            alibi_slopes: self.alibi_slopes.as_deref(),
        }
    }

    /// The query head of a row of `[batch, num_q_heads, q_len]`.
    #[must_use]
    pub fn head(&self, row: usize) -> usize {
        row / self.problem.q_len % self.problem.num_q_heads
    }

    /// Where key `j` of a query's row stands among the rows of k and v.
    #[must_use]
    pub fn kv_row(&self, row: usize, j: usize) -> usize {
        let Problem { num_q_heads, num_kv_heads, q_len, kv_len, .. } = self.problem;
        let batch = row / q_len / num_q_heads;
        (batch * num_kv_heads + self.head(row) / (num_q_heads / num_kv_heads)) * kv_len + j
    }

    /// The keys that each row of `[batch, num_q_heads, q_len]` attends.
    #[must_use]
    pub fn attended(&self, row: usize) -> Vec<usize> {
        let Problem { q_len, kv_len, causal, window, .. } = self.problem;
        let (lo, hi) = rapt_core::BlockRange::new(q_len, kv_len, causal, window).keys_of(row % q_len);
        let at = |j: usize| row * kv_len + j;
        let allowed = |&j: &usize| {
            self.bools.as_ref().is_none_or(|mask| mask[at(j)])
                && self.bias.as_ref().is_none_or(|bias| bias[at(j)] != f64::NEG_INFINITY)
        };
        (lo..hi).filter(allowed).collect()
    }
}

/// What the reference says of these tensors.
///
/// # Panics
/// If the tensors are not those of `spec`.
#[must_use]
pub fn reference(spec: &Spec, tensors: &Tensors<'_>) -> Outputs {
    let gathered = Gathered::new(spec, tensors);
    naive(&gathered.problem, &gathered.inputs())
}

/// What the definition of `compute="int8"` says of these tensors, whose k and v are int8 codes.
///
/// # Panics
/// If the tensors are not those of `spec`.
#[must_use]
pub fn int8_reference(spec: &Spec, tensors: &Tensors<'_>) -> Int8Outputs {
    let gathered = Gathered::new(spec, tensors);
    // Codes as they lie are bytes.
    let codes =
        |view, layout| canonical(view, layout).iter().map(|&byte| f64::from((byte as u8).cast_signed())).collect();
    let (k, v): (Vec<f64>, Vec<f64>) = (codes(&tensors.k, spec.layout), codes(&tensors.v, spec.layout));
    let factors = |codes: &Option<Box<Codes<'_>>>, of: &Option<Box<CodesSpec>>| {
        let (codes, of) = (codes.as_deref().expect("codes"), of.as_deref().expect("codes"));
        let [b, h, s, d] = of.descale.shape;
        let (groups, shape) = match of.granularity {
            Granularity::Tensor => ([1; 4], vec![]),
            Granularity::Head => ([b, h, 1, 1], vec![b, h]),
            Granularity::Token => ([b, h, s, 1], vec![b, h, s]),
            _ => ([b, h, 1, d], vec![b, h, 1, d]),
        };
        (read(&codes.descale, groups, of.descale.strides), shape)
    };
    let [(k_factor, k_shape), (v_factor, v_shape)] =
        [factors(&tensors.codes.k, &spec.codes.k), factors(&tensors.codes.v, &spec.codes.v)];
    let inputs = Int8Inputs {
        inputs: Inputs { k: &k, v: &v, ..gathered.inputs() },
        k: Descale { factor: &k_factor, zero_point: None, shape: &k_shape },
        v: Descale { factor: &v_factor, zero_point: None, shape: &v_shape },
    };
    int8(&gathered.problem, &inputs)
}

/// Writes `outputs` into `out` and `lse`, rounded to their dtypes: what an engine made of the reference does.
///
/// # Panics
/// If the tensors are not those of `spec`, or `outputs` not as long.
pub fn store(spec: &Spec, tensors: &mut Tensors<'_>, outputs: &Outputs) {
    let out = &mut tensors.out;
    let rank = out.shape().len();
    let (mut shape, mut strides) = ([1; 4], [0; 4]);
    shape[4 - rank..].copy_from_slice(out.shape());
    strides[4 - rank..].copy_from_slice(out.strides());
    if spec.layout == TensorLayout::Bshd && rank >= 3 {
        shape.swap(1, 2);
        strides.swap(1, 2);
    }
    write(out, shape, strides, &outputs.out);
    if let Some(lse) = &mut tensors.lse {
        scatter(lse, &outputs.lse);
    }
}

/// Writes every element, in row-major order, rounded to the view's dtype.
///
/// # Panics
/// If there are not as many values as elements, or more than four dimensions.
pub fn scatter(view: &mut ViewMut<'_>, values: &[f64]) {
    let rank = view.shape().len();
    let (mut shape, mut strides) = ([1; 4], [0; 4]);
    shape[4 - rank..].copy_from_slice(view.shape());
    strides[4 - rank..].copy_from_slice(view.strides());
    write(view, shape, strides, values);
}

/// Writes `values` under sizes and strides that are a permutation of the view's own.
fn write(view: &mut ViewMut<'_>, shape: [usize; 4], strides: [isize; 4], values: &[f64]) {
    assert_eq!(shape.iter().product::<usize>(), values.len(), "as many values as elements");
    let (dtype, ptr) = (view.dtype(), view.as_mut_ptr());
    let size = dtype.size_bytes();
    for (at, &value) in element_offsets(shape, strides).into_iter().zip(values) {
        let mut bytes = [0; 8];
        encode(dtype, value, &mut bytes[..size]);
        // SAFETY: the element lies within the view's sizes, and a ViewMut's invariant is that each such address is
        // writable for one element of its dtype, `size` bytes; the view is borrowed mutably.
        unsafe { ptr.offset(at * size as isize).copy_from_nonoverlapping(bytes.as_ptr(), size) };
    }
}
