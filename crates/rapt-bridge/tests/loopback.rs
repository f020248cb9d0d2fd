//! Both sides in one process: a device that is rapt-cpu, asked through the interface.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use rapt_bridge::{Bridge, BridgeError, Interface, Provider, VERSION, interface};
use rapt_core::{
    Arch, Caps, Causal, Codes, CodesForm, Cost, DType, Device, Error, Format, Kernel, KernelKey, Launch, LaunchPlan,
    Offload, Operands, Options, PRounding, Plan, Qkv, Result, SerialExecutor, Shape, Spec, TensorForm, TensorLayout,
    Tensors, View, ViewMut, Work, Workspace,
};
use rapt_testkit::{Config, conformance};

/// What the device holds of other plans and devices: both are given back.
static ALIVE: AtomicUsize = AtomicUsize::new(0);

#[derive(Debug)]
struct Counted;

impl Counted {
    fn new() -> Self {
        ALIVE.fetch_add(1, Ordering::SeqCst);
        Counted
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        ALIVE.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A plan of rapt-cpu as a device has it.
#[derive(Debug)]
struct HeldPlan {
    on_host: Plan,
    cost: Cost,
    _counted: Counted,
}

impl PartialEq for HeldPlan {
    fn eq(&self, other: &Self) -> bool {
        self.on_host == other.on_host
    }
}

impl LaunchPlan for HeldPlan {
    fn block_m(&self) -> usize {
        self.on_host.block_m()
    }
    fn block_n(&self) -> usize {
        self.on_host.block_n()
    }
    fn num_splits(&self) -> usize {
        self.on_host.num_splits()
    }
    fn items(&self) -> usize {
        self.on_host.items()
    }
    fn threads(&self) -> usize {
        self.on_host.threads()
    }
    fn workspace_bytes(&self) -> usize {
        self.on_host.workspace_bytes()
    }
    fn cost(&self) -> &Cost {
        &self.cost
    }
    fn kv_in_place(&self) -> bool {
        self.on_host.kv_in_place()
    }
    fn work(&self) -> Option<Work> {
        self.on_host.work()
    }
    fn launch(&self) -> Option<Launch> {
        Some(Launch { blocks: 3, block_threads: 64, shared_bytes: 4096, multiprocessors: 2, compiled: None })
    }
    fn why(&self, _: &Spec, _: &KernelKey) -> String {
        "because ∞".to_owned()
    }
    fn why_not_faster(&self, _: &Spec, _: &KernelKey) -> String {
        "it is the host".to_owned()
    }
}

/// rapt-cpu in the place of a device.
#[derive(Debug)]
struct HostAsDevice {
    adapter: u32,
    _counted: Counted,
}

/// The last plan that a device made, and what its next run fails of.
static MADE: Mutex<Option<Plan>> = Mutex::new(None);
static FAILS: Mutex<Option<Error>> = Mutex::new(None);
static PANICS: AtomicBool = AtomicBool::new(false);

impl Offload for HostAsDevice {
    fn device(&self) -> Device {
        Device::Vulkan(self.adapter)
    }

    fn plan_host(&self, spec: &Spec) -> Result<Plan> {
        let caps = Caps { arch: Arch::Scalar, threads: 3, clock_hz: Some(1e9) };
        let on_host = rapt_cpu::select(spec, &caps)?;
        let mut key = KernelKey { arch: Arch::Wgsl, ..*on_host.key() };
        if let Some((kernel, p_rounding)) = *locked(&KEY) {
            (key.kernel, key.p_rounding) = (kernel, p_rounding);
        }
        let cost = Cost { bytes_copied: 4711, ..*on_host.cost() };
        let plan = Plan::new(spec.clone(), key, HeldPlan { on_host, cost, _counted: Counted::new() });
        *locked(&MADE) = Some(plan.clone());
        Ok(plan)
    }

    fn is_planned_here(&self, plan: &Plan) -> bool {
        plan.launch_plan::<HeldPlan>().is_ok()
    }

    fn run_host(&self, plan: &Plan, operands: &mut Operands<'_>) -> Result<()> {
        assert!(!PANICS.swap(false, Ordering::SeqCst), "a driver's bug");
        if let Some(error) = locked(&FAILS).take() {
            return Err(error);
        }
        operands.expect(plan.spec())?;
        let on_host = &plan.launch_plan::<HeldPlan>()?.on_host;
        let mut workspace = Workspace::default();
        workspace.ensure(on_host.workspace_bytes())?;
        rapt_cpu::run(on_host, operands, &mut workspace, &SerialExecutor)
    }
}

struct Hosts;

impl Provider for Hosts {
    fn report() -> Vec<(String, String)> {
        vec![("vulkan:0".to_owned(), "a host, größer als nichts".to_owned()), ("vulkan:1".to_owned(), String::new())]
    }

    fn open(adapter: u32) -> Result<Arc<dyn Offload>> {
        match adapter {
            0 | 1 => Ok(Arc::new(HostAsDevice { adapter, _counted: Counted::new() })),
            2 => panic!("a loader's bug"),
            _ => {
                let why = format!("there is no adapter {adapter}");
                Err(Error::DeviceUnavailable { device: Device::Vulkan(adapter), why })
            }
        }
    }
}

static HOSTS: Interface = interface::<Hosts>();

fn bridge() -> Bridge {
    // SAFETY: made by this crate's own `interface`, and a static.
    unsafe { Bridge::new(&raw const HOSTS) }.unwrap()
}

fn locked<T>(of: &'static Mutex<T>) -> std::sync::MutexGuard<'static, T> {
    of.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Tests that look at what is alive, or make a run fail, take turns.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> std::sync::MutexGuard<'static, ()> {
    locked(&TURN)
}

#[test]
fn requests_conform_through_the_interface() {
    let _turn = turn();
    let device = bridge().open(0).unwrap();
    let attend = |spec: &Spec, tensors: Tensors<'_>| {
        let plan = device.plan_host(spec)?;
        // The other side has built the same spec of what crossed.
        assert_eq!(locked(&MADE).as_ref().map(Plan::spec), Some(spec));
        device.run_host(&plan, &mut Operands::check(tensors, spec)?)
    };
    let dtypes = vec![DType::F32, DType::F16, DType::BF16, DType::F64];
    let config = Config { problems: 200, max_work: 100_000, dtypes, quantized: 8, ..Config::default() };
    let tally = conformance(&mut [Box::new(attend)], &config).unwrap_or_else(|failure| panic!("{failure}"));
    assert!(tally.count("random") > 150 && tally.count("unsupported") > 4, "codes alone are refused: {tally}");
}

fn forms(layout: TensorLayout) -> [TensorForm; 2] {
    let of = |heads: usize, len: usize| {
        let shape = match layout {
            TensorLayout::Bhsd => [2, heads, len, 16],
            TensorLayout::Bshd => [2, len, heads, 16],
        };
        let shape = Shape::from(shape);
        TensorForm::new(DType::F32, shape, shape.contiguous().unwrap(), Device::Cpu)
    };
    [of(4, 5), of(2, 70)]
}

#[test]
fn a_plan_says_what_it_says_on_the_other_side() {
    let _turn = turn();
    let device = bridge().open(1).unwrap();
    for layout in [TensorLayout::Bhsd, TensorLayout::Bshd] {
        let [q, kv] = forms(layout);
        let options = Options::default()
            .with_layout(layout)
            .with_causal(Causal::BottomRight)
            .with_softcap(5.0)
            .with_window(Some(usize::MAX), None)
            .with_softmax_scale(0.3);
        let spec = Spec::builder(q, kv, kv, &options).return_lse(true).build().unwrap();
        let plan = device.plan_host(&spec).unwrap();
        let there = locked(&MADE).clone().unwrap();
        assert_eq!((plan.spec(), plan.key()), (there.spec(), there.key()));
        assert_eq!((plan.cost(), plan.work(), plan.launch()), (there.cost(), there.work(), there.launch()));
        assert_eq!(plan.cost().bytes_copied, 4711);
        assert_eq!(plan.explain().to_string(), there.explain().to_string());
        assert_eq!(plan, device.plan_host(&spec).unwrap(), "of one request");
        let numbers = |plan: &Plan| {
            let sizes = [plan.block_m(), plan.block_n(), plan.num_splits(), plan.items(), plan.threads()];
            (sizes, plan.workspace_bytes(), plan.kv_in_place(), plan.why(), plan.why_not_faster())
        };
        assert_eq!(numbers(&plan), numbers(&there));
        assert_eq!(plan.why(), "because ∞");
    }
}

/// What `plan_host` of the device answers with instead of the host's own.
static KEY: Mutex<Option<(Kernel, PRounding)>> = Mutex::new(None);

#[test]
fn every_kernel_and_rounding_crosses() {
    let _turn = turn();
    let device = bridge().open(0).unwrap();
    let [q, kv] = forms(TensorLayout::Bhsd);
    let spec = Spec::builder(q, kv, kv, &Options::default()).build().unwrap();
    for &kernel in Kernel::ALL {
        for &p_rounding in PRounding::ALL {
            *locked(&KEY) = Some((kernel, p_rounding));
            let plan = device.plan_host(&spec);
            *locked(&KEY) = None;
            let key = *plan.unwrap().key();
            assert_eq!((key.kernel, key.p_rounding), (kernel, p_rounding));
        }
    }
}

#[test]
fn adapters_are_told_and_those_that_fail_say_why() {
    let _turn = turn();
    let rows = bridge().report();
    assert_eq!(rows[0], ("vulkan:0".to_owned(), "a host, größer als nichts".to_owned()));
    assert_eq!(rows.len(), 2);
    let error = bridge().open(7).unwrap_err();
    let why = "there is no adapter 7".to_owned();
    assert_eq!(error, Error::DeviceUnavailable { device: Device::Vulkan(7), why });
    let error = bridge().open(2).unwrap_err();
    assert_eq!(error, Error::WorkerPanicked { message: "a loader's bug".to_owned() });
}

#[test]
fn what_fails_there_arrives_as_it_was_and_the_next_run_is_served() {
    let _turn = turn();
    let device = bridge().open(0).unwrap();
    let numbers = [0.5f32; 8];
    let view = || View::contiguous("q", &numbers, [2, 4].into()).unwrap();
    let spec = Spec::builder(&view(), &view(), &view(), &Options::default()).build().unwrap();
    let plan = device.plan_host(&spec).unwrap();
    let run = |out: &mut [f32; 8]| {
        let out = ViewMut::contiguous("out", out, [2, 4].into()).unwrap();
        device.run_host(&plan, &mut Operands::check(Tensors::new(view(), view(), view(), out), &spec).unwrap())
    };
    let mut out = [f32::NAN; 8];
    for error in [
        Error::unsupported("this", "why not", "that"),
        Error::OutOfMemory { bytes: 1 << 40 },
        Error::DeviceFailed { device: Device::Vulkan(0), why: "it is lost".to_owned() },
        Error::DeviceUnavailable { device: Device::Vulkan(0), why: "it is gone".to_owned() },
    ] {
        *locked(&FAILS) = Some(error.clone());
        assert_eq!(run(&mut out).unwrap_err(), error);
    }
    // What has no code of its own is the device's failure, in its words.
    *locked(&FAILS) = Some(Error::NotAsPlanned { tensor: "q", what: "dtype" });
    let other = run(&mut out).unwrap_err();
    assert!(matches!(&other, Error::DeviceFailed { why, .. } if why.contains("q is not what the plan")), "{other}");
    PANICS.store(true, Ordering::SeqCst);
    assert_eq!(run(&mut out).unwrap_err(), Error::WorkerPanicked { message: "a driver's bug".to_owned() });
    assert!(out.iter().all(|x| x.is_nan()), "nothing was written");
    run(&mut out).unwrap();
    assert_eq!(out, numbers, "equal values: their mean");
}

#[test]
fn what_is_no_dense_tensor_of_numbers_does_not_cross() {
    let _turn = turn();
    let device = bridge().open(0).unwrap();
    let (codes, descale) = ([1i8; 8], [1f32; 1]);
    let view = View::contiguous("k", &codes, [2, 4].into()).unwrap();
    let scale = View::contiguous("k_descale", &descale, [].into()).unwrap();
    let numbers = [0.5f32; 8];
    let q = View::contiguous("q", &numbers, [2, 4].into()).unwrap();
    let codes = Qkv { q: None, k: Some(CodesForm::from(&Codes::new(Format::Int8, scale))), v: None };
    let spec = Spec::builder(&q, &view, &q, &Options::default()).codes(codes).build().unwrap();
    *locked(&MADE) = None;
    let error = device.plan_host(&spec).unwrap_err();
    assert!(matches!(&error, Error::Unsupported { what, .. } if what.ends_with("codes on vulkan:0")), "{error}");
    let spec = Spec::builder(&q, &q, &q, &Options::default().with_dropout_p(0.5)).build().unwrap();
    let error = device.plan_host(&spec).unwrap_err();
    assert!(matches!(&error, Error::Unsupported { what, .. } if what == "dropout_p=0.5 on vulkan:0"), "{error}");
    assert!(locked(&MADE).is_none(), "the device was not asked");
}

#[test]
fn plans_are_of_their_device_and_all_is_given_back() {
    let _turn = turn();
    *locked(&MADE) = None;
    let before = ALIVE.load(Ordering::SeqCst);
    let [q, kv] = forms(TensorLayout::Bhsd);
    let spec = Spec::builder(q, kv, kv, &Options::default()).build().unwrap();
    let (one, other) = (bridge().open(0).unwrap(), bridge().open(0).unwrap());
    let plan = one.plan_host(&spec).unwrap();
    *locked(&MADE) = None;
    assert!(one.is_planned_here(&plan) && !other.is_planned_here(&plan));
    assert_eq!(ALIVE.load(Ordering::SeqCst), before + 3, "two devices and a plan");
    drop((one, other));
    assert_eq!(ALIVE.load(Ordering::SeqCst), before + 1, "a plan outlives its device");
    drop(plan);
    assert_eq!(ALIVE.load(Ordering::SeqCst), before);
}

#[test]
fn a_library_of_another_version_is_refused() {
    let other = [VERSION + 1];
    // SAFETY: the version is all that is read of another version.
    let error = unsafe { Bridge::new(other.as_ptr().cast()) }.unwrap_err();
    assert_eq!(error, BridgeError { got: VERSION + 1 });
    assert!(error.to_string().contains("version 2, this one asks for 1"), "{error}");
}
