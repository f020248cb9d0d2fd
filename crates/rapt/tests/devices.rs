//! Engines on devices by name, where there is none: in every build.

use rapt::{Device, Engine, Error};

#[test]
fn an_engine_is_on_the_device_that_was_asked_for_or_an_error_says_why_not() {
    assert_eq!(Engine::on(Device::Cpu, Some(2)).unwrap().threads().get(), 2);
    let why = |device| match Engine::on(device, None) {
        Err(Error::DeviceUnavailable { device: named, why }) if named == device => why,
        other => panic!("{device}: {other:?}"),
    };
    assert!(why(Device::Cuda(0)).contains("tensors of the host"));
    let vulkan = why(Device::Vulkan(4711));
    let expected = if cfg!(feature = "vulkan") { "no Vulkan adapter 4711" } else { "the cargo feature `vulkan`" };
    assert!(vulkan.contains(expected), "{vulkan}");
    // And the doctor says it.
    let rows = rapt::doctor::vulkan();
    assert!(rows.iter().all(|(name, text)| name.starts_with("vulkan") && !text.is_empty()), "{rows:?}");
    assert_eq!(rows[0].1 == "not in this build", !cfg!(feature = "vulkan"), "{rows:?}");
}
