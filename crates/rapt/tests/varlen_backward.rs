//! Gradients of sequences that lie one after another: those of a call alone, bit for bit, from any strides and on any number of threads; zeros in rows of
//! no sequence; and what is refused has written nothing.

use rapt::{
    BackwardTensors, Causal, DropoutSeed, Element, Engine, Error, Options, Queue, SequenceRows, Shape, TensorLayout,
    Tensors, VarlenBackwardTensors, VarlenTensors, View, ViewMut,
};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 24;
const DIM_V: usize = 16;

/// A number of one dtype.
trait Float: Element + Copy {
    /// lse and sums of sinks are of it.
    type Wide: Float;
    fn of(x: f64) -> Self;
    fn wide(self) -> f64;
    fn bits(self) -> u64 {
        // NaN is what nobody wrote.
        self.wide().to_bits()
    }
}

macro_rules! float {
    ($ty:ty, $wide:ty, $of:expr) => {
        impl Float for $ty {
            type Wide = $wide;
            fn of(x: f64) -> Self {
                $of(x)
            }
            fn wide(self) -> f64 {
                f64::from(self)
            }
        }
    };
}
float!(f64, f64, |x| x);
float!(f32, f32, |x| x as f32);
float!(half::bf16, f32, half::bf16::from_f64);

/// Where the elements of a `[rows, heads, dim]` lie.
#[derive(Clone, Copy, Debug)]
enum Lie {
    Rows,
    /// The heads before the rows.
    Heads,
    /// Every other element of rows from the last to the first.
    Backwards,
}

/// A packed tensor in any order, NaN around it.
struct Packed<T> {
    data: Vec<T>,
    offset: usize,
    shape: [usize; 3],
    strides: [isize; 3],
}

impl<T: Float> Packed<T> {
    fn new(shape: [usize; 3], lie: Lie, value: impl Fn(usize, usize, usize) -> f64) -> Self {
        let [rows, heads, dim] = shape;
        let (offset, strides, len) = match lie {
            Lie::Rows => (0, [(heads * dim) as isize, dim as isize, 1], rows * heads * dim),
            Lie::Heads => (0, [dim as isize, (rows * dim) as isize, 1], rows * heads * dim),
            Lie::Backwards => {
                let row = 2 * heads * dim;
                (rows.saturating_sub(1) * row, [-(row as isize), 2 * dim as isize, 2], rows * row)
            }
        };
        let mut packed = Packed { data: vec![T::of(f64::NAN); len], offset, shape, strides };
        for r in 0..rows {
            for h in 0..heads {
                for d in 0..dim {
                    let at = packed.at([r, h, d]);
                    packed.data[at] = T::of(value(r, h, d));
                }
            }
        }
        packed
    }

    fn at(&self, index: [usize; 3]) -> usize {
        let step: isize = index.iter().zip(self.strides).map(|(&i, stride)| i as isize * stride).sum();
        self.offset.wrapping_add_signed(step)
    }

    fn view(&self, name: &'static str) -> View<'_> {
        View::strided(name, &self.data, self.offset, self.shape.into(), self.strides.into()).unwrap()
    }

    fn view_mut(&mut self, name: &'static str) -> ViewMut<'_> {
        ViewMut::strided(name, &mut self.data, self.offset, self.shape.into(), self.strides.into()).unwrap()
    }

    /// Rows `range`, one after another.
    fn rows(&self, range: &std::ops::Range<usize>) -> Vec<T> {
        let [_, heads, dim] = self.shape;
        let places = range.clone().flat_map(|r| (0..heads).flat_map(move |h| (0..dim).map(move |d| [r, h, d])));
        places.map(|index| self.data[self.at(index)]).collect()
    }
}

fn wave(seed: f64) -> impl Fn(usize, usize, usize) -> f64 {
    move |r, h, d| ((r * 131 + h * 17 + d) as f64 * seed).sin() * 1.5
}

/// Every tensor of a call, packed.
struct Call<T: Float> {
    q: Packed<T>,
    k: Packed<T>,
    v: Packed<T>,
    d_o: Packed<T>,
    out: Packed<T>,
    lse: Vec<T::Wide>,
    d_lse: Option<Vec<T::Wide>>,
    sinks: Option<Vec<T>>,
    of_q: Vec<i32>,
    of_kv: Vec<i32>,
    dropout: Option<DropoutSeed>,
    dq: Packed<T>,
    dk: Packed<T>,
    dv: Packed<T>,
    d_sinks: Vec<T>,
}

fn offsets(first: usize, lengths: &[usize]) -> Vec<i32> {
    let ends = lengths.iter().scan(first, |end, length| {
        *end += length;
        Some(*end as i32)
    });
    std::iter::once(first as i32).chain(ends).collect()
}

fn bits<T: Float>(numbers: &[T]) -> Vec<u64> {
    numbers.iter().map(|x| x.bits()).collect()
}

impl<T: Float> Call<T> {
    /// Two rows before the first sequence, and three behind the last, are of none: NaN.
    fn new(q_lens: &[usize], kv_lens: &[usize], lie: Lie, has_sinks: bool) -> Self {
        let (of_q, of_kv) = (offsets(2, q_lens), offsets(2, kv_lens));
        let last = |of: &[i32]| *of.last().unwrap() as usize;
        let (queries, keys) = (last(&of_q), last(&of_kv));
        let (rows, kv_rows) = (queries + 3, keys + 3);
        let within = |value: fn(usize, usize, usize) -> f64, end: usize| {
            move |r: usize, h: usize, d: usize| if (2..end).contains(&r) { value(r, h, d) } else { f64::NAN }
        };
        let none = |_, _, _| f64::NAN;
        let lse = vec![T::Wide::of(f64::NAN); HEADS * rows];
        let d_lse = has_sinks.then(|| (0..HEADS * rows).map(|n| T::Wide::of((n as f64 * 0.3).cos())).collect());
        Call {
            q: Packed::new([rows, HEADS, DIM], lie, within(|r, h, d| wave(0.7)(r, h, d), queries)),
            k: Packed::new([kv_rows, KV_HEADS, DIM], lie, within(|r, h, d| wave(1.3)(r, h, d), keys)),
            v: Packed::new([kv_rows, KV_HEADS, DIM_V], lie, within(|r, h, d| wave(0.9)(r, h, d), keys)),
            d_o: Packed::new([rows, HEADS, DIM_V], lie, within(|r, h, d| wave(2.1)(r, h, d), queries)),
            out: Packed::new([rows, HEADS, DIM_V], lie, none),
            lse,
            d_lse,
            sinks: has_sinks.then(|| (0..HEADS).map(|h| T::of(h as f64 - 1.5)).collect()),
            of_q,
            of_kv,
            dropout: None,
            dq: Packed::new([rows, HEADS, DIM], lie, none),
            dk: Packed::new([kv_rows, KV_HEADS, DIM], lie, none),
            dv: Packed::new([kv_rows, KV_HEADS, DIM_V], lie, none),
            d_sinks: vec![T::of(f64::NAN); HEADS],
        }
    }

    fn forward(&mut self, engine: &Engine, options: &Options) -> rapt::Result<()> {
        let rows = self.q.shape[0];
        let tensors = VarlenTensors {
            q: self.q.view("q"),
            k: self.k.view("k"),
            v: self.v.view("v"),
            codes: rapt::Qkv::default(),
            cu_seqlens_q: View::contiguous("cu_seqlens_q", &self.of_q, [self.of_q.len()].into())?,
            cu_seqlens_kv: View::contiguous("cu_seqlens_kv", &self.of_kv, [self.of_kv.len()].into())?,
            sinks: self.sinks.as_ref().map(|x| View::contiguous("sinks", x, [HEADS].into())).transpose()?,
            alibi_slopes: None,
            dropout: self.dropout,
            out: self.out.view_mut("out"),
            lse: Some(ViewMut::contiguous("lse", &mut self.lse, [HEADS, rows].into())?),
        };
        engine.varlen_attention(tensors, options, &Queue::Host(engine.executor()))
    }

    /// `asked`: of dq, dk, dv and d_sinks.
    fn tensors(&mut self, asked: [bool; 4]) -> rapt::Result<VarlenBackwardTensors<'_>> {
        let rows: Shape = [HEADS, self.q.shape[0]].into();
        let lse = View::contiguous("lse", &self.lse, rows)?;
        let d_sinks = ViewMut::contiguous("d_sinks", &mut self.d_sinks, [HEADS].into())?;
        let tensors = BackwardTensors {
            sinks: self.sinks.as_ref().map(|x| View::contiguous("sinks", x, [HEADS].into())).transpose()?,
            dropout: self.dropout,
            d_lse: self.d_lse.as_ref().map(|x| View::contiguous("d_lse", x, rows)).transpose()?,
            dq: asked[0].then(|| self.dq.view_mut("dq")),
            dk: asked[1].then(|| self.dk.view_mut("dk")),
            dv: asked[2].then(|| self.dv.view_mut("dv")),
            d_sinks: asked[3].then_some(d_sinks),
            ..BackwardTensors::new(
                [self.q.view("q"), self.k.view("k"), self.v.view("v")],
                self.out.view("out"),
                lse,
                self.d_o.view("d_o"),
            )
        };
        Ok(VarlenBackwardTensors {
            cu_seqlens_q: View::contiguous("cu_seqlens_q", &self.of_q, [self.of_q.len()].into())?,
            cu_seqlens_kv: View::contiguous("cu_seqlens_kv", &self.of_kv, [self.of_kv.len()].into())?,
            tensors,
        })
    }

    fn backward(&mut self, engine: &Engine, options: &Options, asked: [bool; 4]) -> rapt::Result<()> {
        engine.varlen_backward(self.tensors(asked)?, options, &Queue::Host(engine.executor()))
    }

    /// That rows of no sequence are zeros in every output, −inf in lse.
    fn check_gaps(&self) {
        for packed in [&self.out, &self.dq, &self.dk, &self.dv] {
            let rows = packed.shape[0];
            let (first, last) = (packed.rows(&(0..2)), packed.rows(&(rows - 3..rows)));
            assert!(first.iter().chain(&last).all(|x| x.bits() == 0), "rows of no sequence");
        }
        let rows = self.q.shape[0];
        for head in self.lse.chunks(rows) {
            let gaps = head[..2].iter().chain(&head[rows - 3..]);
            assert!(gaps.copied().all(|x| x.wide() == f64::NEG_INFINITY));
        }
    }

    /// The gradients of sequence `n` from a call alone, on tensors of its own: dq, dk, dv, d_sinks.
    fn alone(&self, n: usize, engine: &Engine, options: &Options) -> [Vec<T>; 4] {
        let part = |of: &[i32]| of[n] as usize..of[n + 1] as usize;
        let (rows, keys) = (part(&self.of_q), part(&self.of_kv));
        let (q, d_o, out) = (self.q.rows(&rows), self.d_o.rows(&rows), self.out.rows(&rows));
        let (k, v) = (self.k.rows(&keys), self.v.rows(&keys));
        let total = self.q.shape[0];
        let of_rows = |of: &[T::Wide]| -> Vec<T::Wide> {
            of.chunks(total).flat_map(|head| head[rows.clone()].to_vec()).collect()
        };
        let (lse, d_lse) = (of_rows(&self.lse), self.d_lse.as_deref().map(of_rows));
        let (q_len, kv_len) = (rows.len(), keys.len());
        let nan = |len: usize| vec![T::of(f64::NAN); len];
        let [mut dq, mut dk, mut dv, mut d_sinks] = [nan(q.len()), nan(k.len()), nan(v.len()), nan(HEADS)];
        let view = |name, data, shape: [usize; 3]| View::contiguous::<T>(name, data, shape.into()).unwrap();
        let inputs = [
            view("q", &q, [q_len, HEADS, DIM]),
            view("k", &k, [kv_len, KV_HEADS, DIM]),
            view("v", &v, [kv_len, KV_HEADS, DIM_V]),
        ];
        let of_out = [q_len, HEADS, DIM_V];
        let lse = View::contiguous("lse", &lse, [HEADS, q_len].into()).unwrap();
        let tensors = BackwardTensors {
            sinks: self.sinks.as_ref().map(|x| View::contiguous("sinks", x, [HEADS].into()).unwrap()),
            dropout: self.dropout.map(|seed| DropoutSeed { first_batch: seed.first_batch + n as u32, ..seed }),
            d_lse: d_lse.as_ref().map(|x| View::contiguous("d_lse", x, [HEADS, q_len].into()).unwrap()),
            dq: Some(ViewMut::contiguous("dq", &mut dq, [q_len, HEADS, DIM].into()).unwrap()),
            dk: Some(ViewMut::contiguous("dk", &mut dk, [kv_len, KV_HEADS, DIM].into()).unwrap()),
            dv: Some(ViewMut::contiguous("dv", &mut dv, [kv_len, KV_HEADS, DIM_V].into()).unwrap()),
            d_sinks: self.sinks.as_ref().map(|_| ViewMut::contiguous("d_sinks", &mut d_sinks, [HEADS].into()).unwrap()),
            ..BackwardTensors::new(inputs, view("out", &out, of_out), lse, view("d_o", &d_o, of_out))
        };
        engine.backward_into(tensors, &Options { layout: TensorLayout::Bshd, ..*options }).unwrap();
        [dq, dk, dv, d_sinks]
    }
}

const Q_LENS: [usize; 6] = [1, 40, 0, 3, 300, 2];
const KV_LENS: [usize; 6] = [400, 40, 7, 0, 290, 1];

fn check_bits<T: Float>(options: &Options, lie: Lie, has_sinks: bool) {
    let engine = Engine::new(Some(2)).unwrap();
    let mut all = Call::<T>::new(&Q_LENS, &KV_LENS, lie, has_sinks);
    all.forward(&engine, options).unwrap();
    all.backward(&engine, options, [true, true, true, has_sinks]).unwrap();
    all.check_gaps();
    let mut of_sinks = vec![0f64; HEADS];
    for n in 0..Q_LENS.len() {
        let part = |of: &[i32]| of[n] as usize..of[n + 1] as usize;
        let [dq, dk, dv, d_sinks] = all.alone(n, &engine, options);
        for (name, packed, rows, alone) in [
            ("dq", &all.dq, part(&all.of_q), &dq),
            ("dk", &all.dk, part(&all.of_kv), &dk),
            ("dv", &all.dv, part(&all.of_kv), &dv),
        ] {
            assert!(alone.iter().all(|x| x.wide().is_finite()));
            assert_eq!(bits(&packed.rows(&rows)), bits(alone), "{name} of sequence {n}, {lie:?}");
        }
        if has_sinks {
            of_sinks.iter_mut().zip(&d_sinks).for_each(|(sum, own)| *sum += own.wide());
        }
    }
    if has_sinks {
        // Sums of float32's, of which each alone was rounded once more where storage is narrower.
        for (got, sum) in all.d_sinks.iter().zip(&of_sinks) {
            let rounding = if size_of::<T>() == 2 { 2e-2 } else { 1e-5 };
            assert!((got.wide() - sum).abs() <= rounding * (1.0 + sum.abs()), "{} is not {sum}", got.wide());
        }
    }
    let between = |packed: &Packed<T>| packed.data.iter().filter(|x| x.wide().is_nan()).count();
    let untouched = |packed: &Packed<T>| packed.data.len() - packed.shape.iter().product::<usize>();
    for packed in [&all.dq, &all.dk, &all.dv, &all.out] {
        assert_eq!(between(packed), untouched(packed), "what lies between elements is as it was");
    }
    // Any number of threads.
    let first = [bits(&all.dq.data), bits(&all.dk.data), bits(&all.dv.data), bits(&all.d_sinks)];
    for threads in [1, 3, 8] {
        let engine = Engine::new(Some(threads)).unwrap();
        all.backward(&engine, options, [true, true, true, has_sinks]).unwrap();
        let again = [bits(&all.dq.data), bits(&all.dk.data), bits(&all.dv.data), bits(&all.d_sinks)];
        assert!(again == first, "{threads} threads");
    }
}

#[test]
fn each_sequence_has_the_gradients_of_a_call_alone() {
    let causal = |causal| Options { causal: Some(causal), ..Options::default() };
    let windowed = causal(Causal::BottomRight).with_window(Some(5), None).with_softcap(3.0);
    check_bits::<f32>(&Options::default(), Lie::Rows, false);
    check_bits::<f32>(&causal(Causal::TopLeft), Lie::Heads, true);
    check_bits::<f32>(&windowed, Lie::Backwards, true);
    check_bits::<f64>(&causal(Causal::BottomRight), Lie::Heads, true);
    check_bits::<half::bf16>(&windowed, Lie::Heads, true);
    check_bits::<half::bf16>(&Options { softmax_scale: Some(-0.3), ..Options::default() }, Lie::Backwards, false);
}

#[test]
fn a_subset_has_the_same_bits_and_nothing_else_is_written() {
    let (engine, options) = (Engine::new(Some(2)).unwrap(), Options::default());
    let mut all = Call::<f32>::new(&Q_LENS, &KV_LENS, Lie::Rows, true);
    all.forward(&engine, &options).unwrap();
    all.backward(&engine, &options, [true; 4]).unwrap();
    let expected = [bits(&all.dq.data), bits(&all.dk.data), bits(&all.dv.data), bits(&all.d_sinks)];
    assert!(expected.iter().flatten().all(|&x| f64::from_bits(x).is_finite()));
    for asked in 0..16u32 {
        let asked: [bool; 4] = std::array::from_fn(|n| asked >> n & 1 == 1);
        let mut part = Call::<f32>::new(&Q_LENS, &KV_LENS, Lie::Rows, true);
        part.forward(&engine, &options).unwrap();
        part.backward(&engine, &options, asked).unwrap();
        let got = [bits(&part.dq.data), bits(&part.dk.data), bits(&part.dv.data), bits(&part.d_sinks)];
        for ((is_asked, got), expected) in asked.iter().zip(&got).zip(&expected) {
            if *is_asked {
                assert_eq!(got, expected);
            } else {
                assert!(got.iter().all(|&x| f64::from_bits(x).is_nan()), "{asked:?}");
            }
        }
    }
}

#[test]
fn what_cannot_be_is_refused_and_nothing_is_written() {
    let engine = Engine::new(Some(1)).unwrap();
    let refused = |bend: &dyn Fn(&mut Call<f32>), asked: [bool; 4]| {
        let mut all = Call::<f32>::new(&[2, 3], &[4, 5], Lie::Rows, false);
        all.forward(&engine, &Options::default()).unwrap();
        bend(&mut all);
        let error = all.backward(&engine, &Options::default(), asked).unwrap_err();
        let written = [&all.dq.data, &all.dk.data, &all.dv.data, &all.d_sinks];
        assert!(written.into_iter().flatten().all(|x| x.is_nan()), "nothing is written: {error}");
        error
    };
    let three = [true, true, true, false];
    let at = |error: &Error| match error {
        Error::Length { tensor, at, got, .. } => (*tensor, *at, *got),
        other => panic!("{other}"),
    };
    // What forward says of the same offsets.
    for (name, of_q, place, offset) in [
        ("cu_seqlens_q", true, 0, -1),
        ("cu_seqlens_q", true, 1, 8),
        ("cu_seqlens_kv", false, 2, 15),
        ("cu_seqlens_kv", false, 2, 3),
    ] {
        let bend = |all: &mut Call<f32>| (if of_q { &mut all.of_q } else { &mut all.of_kv })[place] = offset;
        let error = refused(&bend, three);
        let mut all = Call::<f32>::new(&[2, 3], &[4, 5], Lie::Rows, false);
        bend(&mut all);
        assert_eq!(all.forward(&engine, &Options::default()).unwrap_err(), error);
        assert_eq!(at(&error).0, name);
    }
    let of_sinks = refused(&|_| {}, [true, true, true, true]);
    assert!(matches!(of_sinks, Error::Unsupported { .. }), "no sinks: {of_sinks}");
    let shape = refused(&|all| all.dk = Packed::new([12, KV_HEADS, DIM], Lie::Rows, |_, _, _| f64::NAN), three);
    assert!(matches!(shape, Error::ShapeMismatch { tensor: "dk", .. }), "{shape}");
    let sequences = refused(&|all| all.of_kv.truncate(2), three);
    assert!(matches!(sequences, Error::SizeMismatch { size: "sequences", .. }), "{sequences}");
    // The gradient of one sequence in the memory of another's, and that of no sequence in its own.
    let mut all = Call::<f32>::new(&[2, 3], &[4, 5], Lie::Rows, false);
    all.forward(&engine, &Options::default()).unwrap();
    let row = KV_HEADS * DIM_V;
    let mut memory = vec![f32::NAN; (14 + 5) * row];
    let address = memory.as_mut_ptr();
    let mut tensors = all.tensors([false; 4]).unwrap();
    // Of the sizes of v alone, so that both fit.
    (tensors.tensors.k, tensors.tensors.q) = (tensors.tensors.v, tensors.tensors.out);
    let shape = Shape::from([14, KV_HEADS, DIM_V]);
    let [dk, dv] = [("dk", 0), ("dv", 5)].map(|(name, first)| {
        let (ptr, strides) = (address.wrapping_add(first * row).cast(), shape.contiguous().unwrap());
        // SAFETY: nobody reads or writes what they name.
        let view = unsafe {
            ViewMut::from_raw_parts(
                name,
                ptr,
                rapt::DType::F32,
                shape,
                strides,
                rapt::Device::Cpu,
                rapt::Extent::Declared,
            )
        };
        Some(view.unwrap())
    });
    (tensors.tensors.dk, tensors.tensors.dv) = (dk, dv);
    let error = engine.varlen_backward(tensors, &Options::default(), &Queue::Host(engine.executor())).unwrap_err();
    assert_eq!(error, Error::OutputOverlaps { tensor: "dv", other: "dk" });
    assert!(memory.iter().all(|x| x.is_nan()));
}

/// Rows that lie anywhere: sequences with holes between them, and keys that are not at the rows of their values.
#[test]
fn rows_anywhere_have_the_bits_of_packed_ones_and_holes_are_zeros() {
    let (engine, options) = (Engine::new(Some(2)).unwrap(), Options::default());
    let queue = || Queue::Host(engine.executor());
    let rows = SequenceRows { q: vec![1..4, 4..4, 9..30], k: vec![0..5, 7..9, 10..20], v: vec![3..8, 8..10, 12..22] };
    let number = |seed| move |r: usize, h: usize, d: usize| wave(seed)(r, h, d);
    let q = Packed::<f32>::new([33, HEADS, DIM], Lie::Rows, number(0.7));
    let k = Packed::<f32>::new([21, KV_HEADS, DIM], Lie::Rows, number(1.3));
    let v = Packed::<f32>::new([25, KV_HEADS, DIM_V], Lie::Rows, number(0.9));
    let d_o = Packed::<f32>::new([33, HEADS, DIM_V], Lie::Rows, number(2.1));
    let none = |of: &Packed<f32>| Packed::<f32>::new(of.shape, Lie::Rows, |_, _, _| f64::NAN);
    let (mut out, mut lse) = (none(&d_o), vec![f32::NAN; HEADS * 33]);
    let forward = rapt::PackedTensors {
        q: q.view("q"),
        k: k.view("k"),
        v: v.view("v"),
        codes: rapt::Qkv::default(),
        sinks: None,
        alibi_slopes: None,
        dropout: None,
        out: out.view_mut("out"),
        lse: Some(ViewMut::contiguous("lse", &mut lse, [HEADS, 33].into()).unwrap()),
    };
    engine.packed_attention(forward, &rows, &options, &queue()).unwrap();
    let (mut dq, mut dk, mut dv) = (none(&q), none(&k), none(&v));
    let run = |dq: ViewMut<'_>, dk: ViewMut<'_>, dv: ViewMut<'_>, rows: &SequenceRows| {
        let lse = View::contiguous("lse", &lse, [HEADS, 33].into()).unwrap();
        let tensors = BackwardTensors {
            dq: Some(dq),
            dk: Some(dk),
            dv: Some(dv),
            ..BackwardTensors::new([q.view("q"), k.view("k"), v.view("v")], out.view("out"), lse, d_o.view("d_o"))
        };
        engine.packed_backward(tensors, rows, &options, &queue())
    };
    run(dq.view_mut("dq"), dk.view_mut("dk"), dv.view_mut("dv"), &rows).unwrap();
    for n in 0..3 {
        // The rows of one sequence as a varlen call of its own.
        let own = |packed: &Packed<f32>, range: &std::ops::Range<usize>| {
            let data = packed.rows(range);
            let [_, heads, dim] = packed.shape;
            Packed::<f32>::new([range.len(), heads, dim], Lie::Rows, |r, h, d| {
                f64::from(data[(r * heads + h) * dim + d])
            })
        };
        let mut one = Call::<f32>::new(&[rows.q[n].len()], &[rows.k[n].len()], Lie::Rows, false);
        (one.q, one.k, one.v) = (own(&q, &rows.q[n]), own(&k, &rows.k[n]), own(&v, &rows.v[n]));
        (one.d_o, one.out) = (own(&d_o, &rows.q[n]), own(&d_o, &rows.q[n]));
        (one.dq, one.dk, one.dv) = (none(&one.q), none(&one.k), none(&one.v));
        (one.of_q, one.of_kv) = (offsets(0, &[rows.q[n].len()]), offsets(0, &[rows.k[n].len()]));
        one.lse = vec![f32::NAN; HEADS * rows.q[n].len()];
        one.forward(&engine, &options).unwrap();
        one.backward(&engine, &options, [true, true, true, false]).unwrap();
        assert_eq!(bits(&out.rows(&rows.q[n])), bits(&one.out.data));
        assert_eq!(bits(&dq.rows(&rows.q[n])), bits(&one.dq.data));
        assert_eq!(bits(&dk.rows(&rows.k[n])), bits(&one.dk.data));
        assert_eq!(bits(&dv.rows(&rows.v[n])), bits(&one.dv.data));
    }
    for (packed, ranges) in [(&out, &rows.q), (&dq, &rows.q), (&dk, &rows.k), (&dv, &rows.v)] {
        let holes = (0..packed.shape[0]).filter(|r| ranges.iter().all(|range| !range.contains(r)));
        assert!(holes.flat_map(|r| packed.rows(&(r..r + 1))).all(|x| x.to_bits() == 0));
    }
    // Keys that two sequences share have no one place for their gradient; neither have ranges that leave the tensors.
    let shared = SequenceRows { k: vec![0..5, 3..5, 10..20], ..rows.clone() };
    let error = run(dq.view_mut("dq"), dk.view_mut("dk"), dv.view_mut("dv"), &shared).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    for bad in [
        SequenceRows { q: vec![1..4, 4..4, 9..34], ..rows.clone() },
        SequenceRows { q: vec![1..4, 3..3, 9..30], ..rows.clone() },
        SequenceRows { k: vec![0..5, 7..9], ..rows.clone() },
        SequenceRows { v: vec![3..8, 8..11, 12..22], ..rows.clone() },
    ] {
        run(dq.view_mut("dq"), dk.view_mut("dk"), dv.view_mut("dv"), &bad).unwrap_err();
    }
}

/// A sequence is its own batch entry: what is dropped of it is what a dense call drops of that entry.
#[test]
fn a_sequence_drops_what_its_batch_entry_drops() {
    let engine = Engine::new(Some(2)).unwrap();
    let options = Options { dropout_p: 0.4, causal: Some(Causal::BottomRight), ..Options::default() };
    let seed = DropoutSeed { first_batch: 3, ..DropoutSeed::new(99, 5) };
    let (q_lens, kv_lens) = ([20, 0, 33, 1], [20, 5, 40, 70]);
    let mut all = Call::<f32>::new(&q_lens, &kv_lens, Lie::Heads, false);
    all.dropout = Some(seed);
    all.forward(&engine, &options).unwrap();
    for n in 0..q_lens.len() {
        let part = |of: &[i32]| of[n] as usize..of[n + 1] as usize;
        let (rows, keys) = (part(&all.of_q), part(&all.of_kv));
        let (q, k, v) = (all.q.rows(&rows), all.k.rows(&keys), all.v.rows(&keys));
        let mut out = vec![f32::NAN; rows.len() * HEADS * DIM_V];
        let view = |name, data, shape: [usize; 3]| View::contiguous::<f32>(name, data, shape.into()).unwrap();
        let tensors = Tensors {
            dropout: Some(DropoutSeed { first_batch: 3 + n as u32, ..seed }),
            ..Tensors::new(
                view("q", &q, [rows.len(), HEADS, DIM]),
                view("k", &k, [keys.len(), KV_HEADS, DIM]),
                view("v", &v, [keys.len(), KV_HEADS, DIM_V]),
                ViewMut::contiguous("out", &mut out, [rows.len(), HEADS, DIM_V].into()).unwrap(),
            )
        };
        engine.attention_into(tensors, &Options { layout: TensorLayout::Bshd, ..options }).unwrap();
        assert_eq!(bits(&all.out.rows(&rows)), bits(&out), "sequence {n}");
    }
    all.backward(&engine, &options, [true, true, true, false]).unwrap();
    for n in 0..q_lens.len() {
        let part = |of: &[i32]| of[n] as usize..of[n + 1] as usize;
        let [dq, dk, dv, _] = all.alone(n, &engine, &options);
        assert_eq!(bits(&all.dq.rows(&part(&all.of_q))), bits(&dq), "dq of sequence {n}");
        assert_eq!(bits(&all.dk.rows(&part(&all.of_kv))), bits(&dk), "dk of sequence {n}");
        assert_eq!(bits(&all.dv.rows(&part(&all.of_kv))), bits(&dv), "dv of sequence {n}");
    }
    all.check_gaps();
    let dropped = bits(&all.out.data);
    all.dropout = Some(DropoutSeed { first_batch: 4, ..seed });
    all.forward(&engine, &options).unwrap();
    assert_ne!(bits(&all.out.data), dropped);
    all.dropout = None;
    for (given, asked) in [(None, "dropout"), (Some(DropoutSeed { first_batch: u32::MAX - 2, ..seed }), "first_batch")]
    {
        all.dropout = given;
        let error = all.forward(&engine, &options).unwrap_err();
        assert!(matches!(error, Error::Option { option, .. } if option == asked), "{error}");
        assert_eq!(all.backward(&engine, &options, [true, true, true, false]).unwrap_err().kind(), error.kind());
    }
}
