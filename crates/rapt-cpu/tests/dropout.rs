//! Dropout: every weight dropped or kept by the definition, at every place of every kernel, and what its bits depend on.

use rapt_core::{
    Arch, BackwardOperands, BackwardSpec, BackwardTensors, COMPUTED, Caps, Causal, Codes, DType, Dropout, DropoutSeed,
    Error, Executor, Format, GradientForms, Operands, Options, Qkv, Result, SerialExecutor, Spec, TensorLayout,
    Tensors, View, ViewMut, Window, Workspace,
};
use rapt_testkit::{Guard, Placement, Rng, TensorBuf};

struct SpawnedThreads(usize);

impl Executor for SpawnedThreads {
    fn threads(&self) -> usize {
        self.0
    }
    fn parallel_for(&self, chunks: usize, work: &(dyn Fn(usize) + Sync)) -> Result<()> {
        std::thread::scope(|scope| (0..chunks).for_each(|chunk| drop(scope.spawn(move || work(chunk)))));
        Ok(())
    }
}

/// Sizes of a problem, row-major.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    batch: usize,
    heads: usize,
    kv_heads: usize,
    q_len: usize,
    kv_len: usize,
    dim: usize,
    dim_v: usize,
}

fn tensor(dtype: DType, shape: [usize; 4], values: Option<&[f64]>) -> TensorBuf {
    TensorBuf::new(dtype, shape, &Placement::contiguous(shape), Guard::Heap { shift: 0 }, values)
}

/// What `arch` makes of q, k and v: bits and values of out, then those of lse.
fn attend(
    arch: Arch,
    threads: usize,
    dtype: DType,
    sizes: Sizes,
    [q, k, v]: [&[f64]; 3],
    options: &Options,
    seed: DropoutSeed,
) -> [(Vec<u64>, Vec<f64>); 2] {
    let Sizes { batch, heads, kv_heads, q_len, kv_len, dim, dim_v } = sizes;
    let q = tensor(dtype, [batch, heads, q_len, dim], Some(q));
    let k = tensor(dtype, [batch, kv_heads, kv_len, dim], Some(k));
    let v = tensor(dtype, [batch, kv_heads, kv_len, dim_v], Some(v));
    let mut out = tensor(dtype, [batch, heads, q_len, dim_v], None);
    let mut lse = tensor(dtype.accumulation(), [1, batch, heads, q_len], None);
    let layout = TensorLayout::Bhsd;
    let tensors = Tensors {
        dropout: (options.dropout_p > 0.0).then_some(seed),
        lse: Some(lse.view_mut("lse", 3, layout)),
        ..Tensors::new(
            q.view("q", 4, layout),
            k.view("k", 4, layout),
            v.view("v", 4, layout),
            out.view_mut("out", 4, layout),
        )
    };
    let spec = Spec::builder(&tensors.q, &tensors.k, &tensors.v, options).return_lse(true).build().unwrap();
    let plan = rapt_cpu::select(&spec, &Caps { arch, threads, clock_hz: None }).unwrap();
    let text = plan.explain().to_string();
    assert_eq!(text.contains("Philox 4x32-10"), options.dropout_p > 0.0, "{text}");
    let mut workspace = Workspace::new();
    workspace.ensure(plan.workspace_bytes()).unwrap();
    let executor: &dyn Executor = if threads == 1 { &SerialExecutor } else { &SpawnedThreads(threads) };
    rapt_cpu::run(&plan, &mut Operands::check(tensors, &spec).unwrap(), &mut workspace, executor).unwrap();
    [(out.bits(), out.values()), (lse.bits(), lse.values())]
}

/// Keys that all score the same, and values that name them: out says of each weight whether it was kept.
fn mask_of(arch: Arch, dtype: DType, sizes: Sizes, options: &Options, seed: DropoutSeed) {
    let Sizes { batch, heads, kv_heads, q_len, kv_len, dim, .. } = sizes;
    let q = vec![1.0; batch * heads * q_len * dim];
    let k = vec![0.0; batch * kv_heads * kv_len * dim];
    let one: Vec<f64> = (0..kv_len * kv_len).map(|at| if at / kv_len == at % kv_len { 1.0 } else { 0.0 }).collect();
    let v = one.repeat(batch * kv_heads);
    let sizes = Sizes { dim_v: kv_len, ..sizes };
    let [(_, out), _] = attend(arch, 1, dtype, sizes, [&q, &k, &v], options, seed);
    let range = rapt_core::BlockRange::new(q_len, kv_len, options.causal, options.window);
    let dropout = Dropout::new(options.dropout_p).unwrap().unwrap();
    for (row, out) in out.chunks(kv_len).enumerate() {
        let (b, h, i) = (row / q_len / heads, row / q_len % heads, row % q_len);
        let (head, (lo, hi)) = (seed.of_head(b, h), range.keys_of(i));
        for (j, &weight) in out.iter().enumerate() {
            let kept = (lo..hi).contains(&j) && !head.is_dropped(dropout, i, j);
            assert_eq!(
                weight != 0.0,
                kept,
                "{} {dtype}: batch {b}, head {h}, row {i}, key {j} of {sizes:?}",
                arch.name()
            );
            let expect = dropout.scale() / (hi - lo) as f64;
            assert!(!kept || (weight / expect - 1.0).abs() < 0.01, "{weight} is not {expect}");
        }
    }
}

#[test]
fn every_weight_is_dropped_or_kept_by_the_definition() {
    rapt_cpu::tile_every_request();
    let seed = DropoutSeed { first_batch: 3, ..DropoutSeed::new(0x0123_4567_89ab_cdef, (5 << 32) + 1) };
    let plain = Options::default().with_dropout_p(0.4);
    // Tiles narrow and wide, several heads to a tile, rows and keys with tails; few rows are decode's, in several chunks.
    let sizes = [
        (1, 2, 2, 40, 70),
        (2, 6, 2, 5, 33),
        (1, 4, 1, 9, 130),
        (1, 1, 1, 70, 17),
        (2, 4, 2, 1, 150),
        (1, 4, 1, 2, 300),
        (1, 1, 1, 8, 1),
    ];
    let positions = [
        plain,
        plain.with_causal(Causal::BottomRight),
        Options { window: Window { left: Some(11), right: Some(6) }, ..plain },
    ];
    for &arch in rapt_cpu::available() {
        for (n, (batch, heads, kv_heads, q_len, kv_len)) in sizes.into_iter().enumerate() {
            for (at, options) in positions.iter().enumerate() {
                // Each dtype meets each size once at least, and each arch all of them.
                for dtype in COMPUTED.into_iter().skip((n + at) % 2).step_by(2) {
                    let sizes = Sizes { batch, heads, kv_heads, q_len, kv_len, dim: 8, dim_v: 0 };
                    mask_of(arch, dtype, sizes, options, seed);
                }
            }
        }
    }
}

#[test]
fn the_bits_of_a_row_are_its_own() {
    rapt_cpu::tile_every_request();
    let sizes = Sizes { batch: 3, heads: 4, kv_heads: 2, q_len: 50, kv_len: 90, dim: 16, dim_v: 24 };
    let mut rng = Rng::new(4);
    let mut numbers = |n: usize| (0..n).map(|_| rng.normal()).collect::<Vec<f64>>();
    let Sizes { batch, heads, kv_heads, q_len, kv_len, dim, dim_v } = sizes;
    let rounded = |dtype, x: &[f64]| x.iter().map(|&x| rapt_testkit::round(dtype, x)).collect::<Vec<f64>>();
    let [q, k, v] = [batch * heads * q_len * dim, batch * kv_heads * kv_len * dim, batch * kv_heads * kv_len * dim_v]
        .map(&mut numbers);
    let seed = DropoutSeed::new(1, 2);
    let options = Options::default().with_dropout_p(0.2).with_causal(Causal::BottomRight);
    for (&arch, dtype) in rapt_cpu::available().iter().flat_map(|arch| COMPUTED.map(|dtype| (arch, dtype))) {
        let [q, k, v] = [&q, &k, &v].map(|x| rounded(dtype, x));
        let whole = attend(arch, 1, dtype, sizes, [&q, &k, &v], &options, seed);
        assert_eq!(attend(arch, 3, dtype, sizes, [&q, &k, &v], &options, seed), whole, "threads");
        let part = |x: &'_ [f64], b: usize| x[x.len() / batch * b..][..x.len() / batch].to_vec();
        for b in 0..batch {
            // As a sequence of a ragged batch is: its own call, and its index.
            let (q, k, v) = (part(&q, b), part(&k, b), part(&v, b));
            let alone = Sizes { batch: 1, ..sizes };
            let seed = DropoutSeed { first_batch: b as u32, ..seed };
            let [(out, _), (lse, _)] = attend(arch, 1, dtype, alone, [&q, &k, &v], &options, seed);
            assert_eq!(out, whole[0].0[b * out.len()..][..out.len()], "{} {dtype}", arch.name());
            assert_eq!(lse, whole[1].0[b * lse.len()..][..lse.len()], "{} {dtype}", arch.name());
        }
        let without = attend(arch, 1, dtype, sizes, [&q, &k, &v], &Options { dropout_p: 0.0, ..options }, seed);
        assert_eq!(without[1].0, whole[1].0, "lse knows nothing of dropout");
        let all = attend(arch, 1, dtype, sizes, [&q, &k, &v], &Options { dropout_p: 1.0, ..options }, seed);
        assert!(all[0].1.iter().all(|&x| x == 0.0) && all[1] == without[1]);
    }
}

#[test]
fn what_drops_nothing_or_cannot_is_told() {
    let (x, mut out) = ([0.5f32; 64], [0.0f32; 64]);
    let view = |name| View::contiguous(name, &x, [1, 1, 16, 4].into()).unwrap();
    let spec = |options: &Options| Spec::builder(&view("q"), &view("k"), &view("v"), options).build();
    assert!(spec(&Options::default()).unwrap().dropout.is_none());
    let planned = spec(&Options::default().with_dropout_p(0.5)).unwrap();
    assert_eq!(planned.dropout.unwrap().p(), 0.5);
    for p in [-0.1, 1.5, f64::NAN] {
        assert!(matches!(spec(&Options::default().with_dropout_p(p)), Err(Error::Option { option: "dropout_p", .. })));
    }
    let mut check = |spec: &Spec, dropout: Option<DropoutSeed>| {
        let out = ViewMut::contiguous("out", &mut out, [1, 1, 16, 4].into()).unwrap();
        let tensors = Tensors { dropout, ..Tensors::new(view("q"), view("k"), view("v"), out) };
        Operands::check(tensors, spec).map(drop)
    };
    assert!(matches!(check(&planned, None), Err(Error::Option { option: "dropout", .. })));
    check(&planned, Some(DropoutSeed { first_batch: u32::MAX, ..DropoutSeed::default() })).unwrap();
    let plain = spec(&Options::default()).unwrap();
    let refused = check(&plain, Some(DropoutSeed::default()));
    assert_eq!(refused, Err(Error::NotAsPlanned { tensor: "dropout", what: "presence" }));
    // Backward asks for the same: p of the request, a seed of the run.
    let lse = [0.0f32; 16];
    let backward = |options: &Options, dropout: Option<DropoutSeed>| {
        let mut builder = Spec::builder(&view("q"), &view("k"), &view("v"), options);
        let forward = builder.return_lse(true).build().unwrap();
        let spec = BackwardSpec::new(forward, &GradientForms::new(&view("d_o"))).unwrap();
        let lse = View::contiguous("lse", &lse, [1, 1, 16].into()).unwrap();
        let inputs = [view("q"), view("k"), view("v")];
        let tensors = BackwardTensors { dropout, ..BackwardTensors::new(inputs, view("out"), lse, view("d_o")) };
        BackwardOperands::check(tensors, &spec).map(drop)
    };
    let dropping = Options::default().with_dropout_p(0.5);
    assert!(matches!(backward(&dropping, None), Err(Error::Option { option: "dropout", .. })));
    backward(&dropping, Some(DropoutSeed::default())).unwrap();
    assert_eq!(backward(&Options::default(), Some(DropoutSeed::default())), refused);
    // Codes are not trained on.
    let (codes, scale) = ([1i8; 64], [1.0f32]);
    let of_k = Codes::new(Format::Int8, View::contiguous("k_descale", &scale, [].into()).unwrap());
    let k = View::contiguous("k", &codes, [1, 1, 16, 4].into()).unwrap();
    let of = Qkv { q: None, k: Some(&of_k), v: None };
    let refused = Spec::builder(&view("q"), &k, &view("v"), &Options::default().with_dropout_p(0.5)).codes(of).build();
    assert!(matches!(refused, Err(Error::Unsupported { instead, .. }) if instead == "dropout_p=0.0"));
}
