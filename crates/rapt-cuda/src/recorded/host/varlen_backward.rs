//! Gradients of sequences that lie one after another, by the kernels' own sources on this machine's processor: each has the bits of a call alone.

use std::ops::Range;

use rapt_core::{BackwardOperands, BackwardSpec, BackwardTensors, Causal, Options, TensorForm, TensorLayout};
use rapt_testkit::{Placement, Rng, TensorBuf};

use super::dropout::DRAW;
use super::*;

/// Rows of no sequence before the first, and behind the last.
const BEFORE: usize = 2;
const BEHIND: usize = 3;
const HEADS: [usize; 2] = [2, 1];
pub(super) const LAYOUT: TensorLayout = TensorLayout::Bshd;

/// A call; tensors are `[total, heads, dim]`.
pub(super) struct Packed {
    /// Of queries and of keys.
    pub(super) heads: [usize; 2],
    dim: usize,
    pub(super) options: Options,
    pub(super) of_q: Vec<i32>,
    pub(super) of_kv: Vec<i32>,
    /// q, k, v, out, d_o and lse.
    pub(super) given: [TensorBuf; 6],
    slopes: Option<TensorBuf>,
}

fn tensor(dtype: DType, heads: usize, rows: usize, dim: usize, guard: Guard, values: Option<&[f64]>) -> TensorBuf {
    let shape = [1, heads, rows, dim];
    TensorBuf::new(dtype, shape, &Placement::contiguous(shape), guard, values)
}

/// Those rows, as a GPU's.
fn rows<'a>(name: &'static str, of: &'a TensorBuf, range: &Range<usize>) -> View<'a> {
    moved(name, &of.view(name, 3, LAYOUT).narrow(0, range))
}

fn offsets(lengths: &[usize]) -> Vec<i32> {
    let mut all = vec![BEFORE as i32];
    lengths.iter().for_each(|&len| all.push(all[all.len() - 1] + len as i32));
    all
}

impl Packed {
    /// Any numbers for out and lse: both ways compute from the same. Rows of no sequence are NaN, and attend nothing, as a row of the first does;
    /// its last has a lse that is not relied on.
    fn new(dtype: DType, dim: usize, lengths: [&[usize]; 2], options: Options, guard: Guard) -> Self {
        Packed::of_heads(HEADS, dtype, dim, lengths, options, guard)
    }

    pub(super) fn of_heads(
        heads: [usize; 2],
        dtype: DType,
        dim: usize,
        [q_lens, kv_lens]: [&[usize]; 2],
        options: Options,
        guard: Guard,
    ) -> Self {
        let (of_q, of_kv) = (offsets(q_lens), offsets(kv_lens));
        let end = |of: &[i32]| of[of.len() - 1] as usize;
        let mut rng = Rng::new(7);
        let mut numbers = |heads: usize, end: usize, dim: usize| {
            let rows = end + BEHIND;
            let mut all: Vec<f64> = (0..heads * rows * dim).map(|_| rng.normal()).collect();
            for (at, x) in all.iter_mut().enumerate() {
                if !(BEFORE..end).contains(&(at / dim % rows)) {
                    *x = f64::NAN;
                }
            }
            tensor(dtype, heads, rows, dim, guard, Some(&all))
        };
        let [q_heads, kv_heads] = heads;
        let (queries, keys) = (end(&of_q), end(&of_kv));
        let q = numbers(q_heads, queries, dim);
        let (k, v) = (numbers(kv_heads, keys, dim), numbers(kv_heads, keys, dim));
        let (out, d_o) = (numbers(q_heads, queries, dim), numbers(q_heads, queries, dim));
        let rows = queries + BEHIND;
        let lse: Vec<f64> = (0..q_heads * rows)
            .map(|at| match at % rows {
                row if !(BEFORE..queries).contains(&row) || row == BEFORE + 1 => f64::NEG_INFINITY,
                row if row == BEFORE + q_lens[0] - 1 => 2000.0,
                row => 2.0 + row as f64 * 0.01,
            })
            .collect();
        let lse = tensor(dtype.accumulation(), 1, q_heads, rows, guard, Some(&lse));
        let slopes = (dtype == DType::F64).then(|| tensor(dtype, 1, 1, q_heads, guard, Some(&[0.1, 0.03])));
        Packed { heads, dim, options, of_q, of_kv, given: [q, k, v, out, d_o, lse], slopes }
    }

    /// The bits of dq, dk and dv of rows `of`: of all sequences, or of the one of a number.
    fn run(&self, of: [Range<usize>; 2], sequence: Option<usize>) -> [Vec<u64>; 3] {
        self.with(of, sequence, |spec, tensors| {
            let plan = backend().plan_backward(spec).unwrap();
            let mut operands = BackwardOperands::check(tensors, plan.spec()).unwrap();
            let mut states = vec![0u128; plan.workspace_bytes().div_ceil(16)];
            let workspace = DeviceMemory { address: states.as_mut_ptr() as usize, len_bytes: plan.workspace_bytes() };
            // SAFETY: the driver runs on this thread, and has ended when it answers.
            unsafe { backend().run_backward(&plan, &mut operands, workspace, 0) }.unwrap();
        })
    }

    /// Those bits, of what `run` makes of such a request.
    pub(super) fn with(
        &self,
        [of_q, of_kv]: [Range<usize>; 2],
        sequence: Option<usize>,
        run: impl FnOnce(&BackwardSpec, BackwardTensors<'_>),
    ) -> [Vec<u64>; 3] {
        let [q, k, v, out, d_o, lse] = &self.given;
        let dtype = q.dtype();
        let lse = moved("lse", &lse.view("lse", 2, TensorLayout::Bhsd).narrow(1, &of_q));
        let new = |heads: usize, len: usize| tensor(dtype, heads, len, self.dim, Guard::BackPage, None);
        let [heads, kv_heads] = self.heads;
        let mut made = [new(heads, of_q.len()), new(kv_heads, of_kv.len()), new(kv_heads, of_kv.len())];
        let [dq, dk, dv] = &mut made;
        let (mut dq, mut dk) = (dq.view_mut("dq", 3, LAYOUT), dk.view_mut("dk", 3, LAYOUT));
        let mut dv = dv.view_mut("dv", 3, LAYOUT);
        let at = [("cu_seqlens_q", &self.of_q), ("cu_seqlens_kv", &self.of_kv)];
        let at = at.map(|(name, of)| moved(name, &View::contiguous(name, of, [of.len()].into()).unwrap()));
        let slopes = self.slopes.as_ref();
        let tensors = BackwardTensors {
            alibi_slopes: slopes.map(|of| moved("alibi_slopes", &of.view("alibi_slopes", 1, LAYOUT))),
            offsets: sequence.is_none().then_some(at),
            dropout: (self.options.dropout_p > 0.0).then(|| DRAW.after(sequence.unwrap_or(0))),
            dq: Some(moved_mut("dq", &mut dq)),
            dk: Some(moved_mut("dk", &mut dk)),
            dv: Some(moved_mut("dv", &mut dv)),
            ..BackwardTensors::new(
                [rows("q", q, &of_q), rows("k", k, &of_kv), rows("v", v, &of_kv)],
                rows("out", out, &of_q),
                lse,
                rows("d_o", d_o, &of_q),
            )
        };
        run(&self.spec(&tensors), tensors);
        made.map(|of| of.bits())
    }

    fn spec(&self, tensors: &BackwardTensors<'_>) -> BackwardSpec {
        let mut builder = Spec::builder(&tensors.q, &tensors.k, &tensors.v, &self.options);
        builder.alibi_slopes(tensors.alibi_slopes.as_ref()).out(&tensors.out).lse(&tensors.lse);
        if let Some([q, kv]) = &tensors.offsets {
            builder.varlen(q, kv);
        }
        let form = |view: &Option<ViewMut<'_>>| view.as_ref().map(TensorForm::from);
        let (dq, dk, dv) = (form(&tensors.dq), form(&tensors.dk), form(&tensors.dv));
        let forms = rapt_core::GradientForms { dq, dk, dv, ..rapt_core::GradientForms::new(&tensors.d_o) };
        BackwardSpec::new(builder.build().unwrap(), &forms).unwrap()
    }

    pub(super) fn totals(&self) -> [Range<usize>; 2] {
        [0..self.given[0].shape()[2], 0..self.given[1].shape()[2]]
    }

    /// Each sequence is what it is alone, and rows of none are zeros.
    fn check(&self) {
        let all = self.run(self.totals(), None);
        let [rows, kv_rows] = self.totals().map(|of| of.end);
        let mut expected = [(rows, self.heads[0]), (kv_rows, self.heads[1]), (kv_rows, self.heads[1])]
            .map(|(rows, heads)| vec![0f64.to_bits(); heads * rows * self.dim]);
        for n in 0..self.of_q.len() - 1 {
            let of = |of: &[i32]| of[n] as usize..of[n + 1] as usize;
            let (of_q, of_kv) = (of(&self.of_q), of(&self.of_kv));
            let alone = self.run([of_q.clone(), of_kv.clone()], Some(n));
            for ((expected, alone), (range, total)) in
                expected.iter_mut().zip(alone).zip([(&of_q, rows), (&of_kv, kv_rows), (&of_kv, kv_rows)])
            {
                for (head, bits) in alone.chunks((range.len() * self.dim).max(1)).enumerate() {
                    expected[(head * total + range.start) * self.dim..][..bits.len()].copy_from_slice(bits);
                }
            }
        }
        for (name, (all, expected)) in ["dq", "dk", "dv"].into_iter().zip(all.iter().zip(&expected)) {
            let off = all.iter().zip(expected).position(|(got, expected)| got != expected);
            assert_eq!(off.map(|at| (at, f64::from_bits(all[at]), f64::from_bits(expected[at]))), None, "{name}");
        }
    }
}

/// Blocks with one row and with all, sequences without queries and without keys, and one after another of neither.
const LENGTHS: [&[usize]; 2] = [&[70, 0, 0, 5, 129, 64], &[90, 10, 0, 0, 65, 128]];

#[test]
fn each_sequence_has_the_gradients_of_a_call_alone() {
    let heap = Guard::Heap { shift: 0 };
    let options = Options { causal: Some(Causal::BottomRight), layout: LAYOUT, ..Options::default() };
    Packed::new(DType::F16, 32, LENGTHS, options.with_dropout_p(0.4), heap).check();
    Packed::new(DType::F64, 12, LENGTHS, options, heap).check();
}

#[test]
fn offsets_that_lead_elsewhere_lead_nowhere() {
    let options = Options { layout: LAYOUT, dropout_p: 0.4, causal: Some(Causal::BottomRight), ..Options::default() };
    let mut of = Packed::new(DType::F16, 32, LENGTHS, options, Guard::BackPage);
    let bad: [&[i32]; 5] = [
        &[2, 72, 60, 80, 10, 206, 270],
        &[-5, 72, 72, 72, 77, 206, 270],
        &[2, 72, 72, 72, 77, 206, i32::MAX],
        &[i32::MIN, i32::MAX, i32::MIN, i32::MAX, 0, 0, 0],
        &[5000, 4000, 3000, 2000, 1000, 500, -1],
    ];
    let good = (of.of_q.clone(), of.of_kv.clone());
    for bad in bad {
        for (q, kv) in [(bad, &good.1[..]), (&good.0[..], bad), (bad, bad)] {
            (of.of_q, of.of_kv) = (q.to_vec(), kv.to_vec());
            of.run(of.totals(), None);
        }
    }
}
