//! The certificate: its numbers, what it says of proven and declared storage, and what it refuses.

use rapt::{
    Certificate, Cost, Device, Engine, Error, Extent, KernelKey, Launch, LaunchPlan, Operands, Options, Plan, Result,
    Spec, Strides, Tensors, View, ViewMut, Work,
};

const SHAPE: [usize; 4] = [2, 4, 10, 8];
const KV: [usize; 4] = [2, 2, 12, 8];

/// A certificate of plain attention whose k is `[b, s, h, d]` and whose out is every second row of a buffer.
fn certify(change: impl Fn(Plan) -> Plan, declared: bool) -> Result<(Plan, Certificate)> {
    let (q, k, v) = (vec![0.5f32; 640], vec![0.5f32; 384], vec![0.5f32; 384]);
    let (mut out, mut lse) = (vec![0f32; 1280], vec![0f32; 80]);
    let turned: Strides = [192, 8, 16, 1].into();
    let spaced: Strides = [640, 160, 16, 1].into();
    let k = if declared {
        let ptr = k.as_ptr().cast();
        // SAFETY: the 384 elements of k.
        unsafe { View::from_raw_parts("k", ptr, rapt::DType::F32, KV.into(), turned, Device::Cpu, Extent::Declared)? }
    } else {
        View::strided("k", &k, 0, KV.into(), turned)?
    };
    let tensors = Tensors {
        lse: Some(ViewMut::contiguous("lse", &mut lse, [2, 4, 10].into())?),
        ..Tensors::new(
            View::contiguous("q", &q, SHAPE.into())?,
            k,
            View::contiguous("v", &v, KV.into())?,
            ViewMut::strided("out", &mut out, 0, SHAPE.into(), spaced)?,
        )
    };
    let spec = Spec::builder(&tensors.q, &tensors.k, &tensors.v, &Options::default())
        .out(&tensors.out)
        .return_lse(true)
        .build()?;
    let plan = change((*Engine::new(Some(2))?.plan(&spec)?).clone());
    let certificate = plan.certificate(&Operands::check(tensors, &spec)?)?;
    Ok((plan, certificate))
}

#[test]
fn it_holds_the_numbers() {
    let (plan, certificate) = certify(|plan| plan, false).unwrap();
    let names: Vec<_> = certificate.in_bounds.iter().map(|fact| fact.tensor).collect();
    assert_eq!(names, ["q", "k", "v", "out", "lse"]);
    let out = certificate.in_bounds[3];
    assert_eq!((out.elements, out.bytes, out.align_bytes), (640, (0, 5088), 4));
    assert_eq!(out.storage, Some((0, 5120)));
    assert!(certificate.is_proven());
    let injective: Vec<_> = certificate.injective.iter().map(|fact| (fact.tensor, fact.elements)).collect();
    assert_eq!(injective, [("out", 640), ("lse", 80)]);
    let pairs: Vec<_> = certificate.disjoint.iter().map(|fact| (fact.tensor, fact.other)).collect();
    let expect = [("out", "q"), ("out", "k"), ("out", "v"), ("lse", "q"), ("lse", "k"), ("lse", "v"), ("lse", "out")];
    assert_eq!(pairs, expect);
    let coverage = certificate.coverage;
    assert_eq!((coverage.rows, coverage.items), (80, plan.items()));
    let work = coverage.work.unwrap();
    assert_eq!(work.tasks * work.rows, 80);
    let text = plan.explain().certified(&certificate).to_string();
    for line in [
        "out: 640 elements in bytes 0..5088 of a storage of 0..5120: proven",
        "out: 640 elements at 640 addresses (0 steps)",
        "lse shares no byte with q (0 steps), k (0 steps), v (0 steps), out (0 steps)",
        "80 rows = ",
    ] {
        assert!(text.contains(line), "{line:?} in:\n{text}");
    }
    assert!(!text.contains("declared"));
    assert!(!plan.explain().to_string().contains("in bounds"), "no operands, no certificate");
}

#[test]
fn a_declared_storage_is_not_called_proven() {
    let (_, certificate) = certify(|plan| plan, true).unwrap();
    assert!(!certificate.is_proven());
    assert_eq!((certificate.in_bounds[1].tensor, certificate.in_bounds[1].storage), ("k", None));
    assert!(
        certificate
            .to_string()
            .contains("k: 384 elements in bytes 0..1536 of a storage that its producer does not tell")
    );
}

/// A backend's decision that states a partition of its own.
#[derive(Debug, PartialEq)]
struct Stated {
    items: usize,
    num_splits: usize,
    work: Option<Work>,
    cost: Cost,
}

impl LaunchPlan for Stated {
    fn block_m(&self) -> usize {
        1
    }
    fn block_n(&self) -> usize {
        1
    }
    fn num_splits(&self) -> usize {
        self.num_splits
    }
    fn items(&self) -> usize {
        self.items
    }
    fn threads(&self) -> usize {
        1
    }
    fn workspace_bytes(&self) -> usize {
        0
    }
    fn cost(&self) -> &Cost {
        &self.cost
    }
    fn kv_in_place(&self) -> bool {
        true
    }
    fn work(&self) -> Option<Work> {
        self.work
    }
    fn launch(&self) -> Option<Launch> {
        None
    }
    fn why(&self, _: &Spec, _: &KernelKey) -> String {
        String::new()
    }
    fn why_not_faster(&self, _: &Spec, _: &KernelKey) -> String {
        String::new()
    }
}

/// `plan` with another statement of its partition.
fn stating(plan: &Plan, change: impl Fn(&mut Stated)) -> Plan {
    let (items, num_splits, work) = (plan.items(), plan.num_splits(), plan.work());
    let mut stated = Stated { items, num_splits, work, cost: *plan.cost() };
    change(&mut stated);
    Plan::new(plan.spec().clone(), *plan.key(), stated)
}

/// A mistake of a backend.
type Mistake = fn(&mut Stated);

#[test]
fn a_partition_that_leaves_rows_out_is_not_certified() {
    let mistakes: [(&str, Mistake); 6] = [
        ("items", |stated| stated.items -= 1),
        ("parts", |stated| stated.num_splits += 1),
        ("rows that its tasks", |stated| stated.work.as_mut().unwrap().rows -= 1),
        ("items", |stated| stated.work.as_mut().unwrap().rows_per_item = 1),
        ("size of its items", |stated| stated.work.as_mut().unwrap().rows_per_item = 0),
        ("not stated", |stated| stated.work = None),
    ];
    assert!(certify(|plan| stating(&plan, |_| ()), false).is_ok());
    for (says, mistake) in mistakes {
        match certify(|plan| stating(&plan, mistake), false) {
            Err(Error::NotAsPlanned { tensor: "plan", what }) => assert!(what.contains(says), "{what}"),
            other => panic!("{says}: {other:?}"),
        }
    }
    let of_another_spec = |plan: Plan| {
        let mut spec = plan.spec().clone();
        spec.causal = Some(rapt::Causal::TopLeft);
        rapt::select(&spec, Engine::new(Some(2)).unwrap().caps()).unwrap()
    };
    match certify(of_another_spec, false) {
        Err(Error::NotAsPlanned { tensor: "operands", .. }) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_plan_of_another_backend_is_refused_and_writes_nothing() {
    let engine = Engine::new(Some(1)).unwrap();
    let (data, mut out) = (vec![0.5f32; 64], vec![7f32; 64]);
    let q = View::contiguous("q", &data, [1, 1, 16, 4].into()).unwrap();
    let spec = Spec::builder(&q, &q, &q, &Options::default()).build().unwrap();
    let foreign = stating(&engine.plan(&spec).unwrap(), |_| ());
    let own = engine.plan(&spec).unwrap();
    assert!(foreign != *own && *own == own.as_ref().clone() && foreign == foreign.clone());
    let out_view = ViewMut::contiguous("out", &mut out, [1, 1, 16, 4].into()).unwrap();
    let tensors = Tensors::new(q, q, q, out_view);
    let refused = engine.run(&foreign, &mut Operands::check(tensors, foreign.spec()).unwrap());
    assert_eq!(refused, Err(Error::NotAsPlanned { tensor: "plan", what: "backend" }));
    assert_eq!(out, [7f32; 64]);
}

#[test]
fn interleaved_outputs_take_steps_to_be_told_apart() {
    // out and k are the even and the odd columns of one buffer.
    let mut buffer = vec![0.25f32; 2 * 80];
    let base = buffer.as_mut_ptr();
    let extent = Extent::Proven { address: base as usize, len_bytes: 640 };
    let strides: Strides = [80, 80, 16, 2].into();
    let q = vec![0.5f32; 40];
    // SAFETY: 40 elements each, told apart below before anything is written.
    let (k, out) = unsafe {
        (
            View::from_raw_parts(
                "k",
                base.add(1).cast(),
                rapt::DType::F32,
                [1, 1, 5, 8].into(),
                strides,
                Device::Cpu,
                extent,
            ),
            ViewMut::from_raw_parts(
                "out",
                base.cast(),
                rapt::DType::F32,
                [1, 1, 5, 8].into(),
                strides,
                Device::Cpu,
                extent,
            ),
        )
    };
    let (q, k) = (View::contiguous("q", &q, [1, 1, 5, 8].into()).unwrap(), k.unwrap());
    let tensors = Tensors::new(q, k, k, out.unwrap());
    let spec = Spec::builder(&q, &k, &k, &Options::default()).out(&tensors.out).build().unwrap();
    let plan = Engine::new(Some(1)).unwrap().plan(&spec).unwrap();
    let certificate = plan.certificate(&Operands::check(tensors, &spec).unwrap()).unwrap();
    let steps: Vec<_> = certificate.disjoint.iter().map(|fact| (fact.other, fact.steps > 0)).collect();
    assert_eq!(steps, [("q", false), ("k", true), ("v", true)]);
}
