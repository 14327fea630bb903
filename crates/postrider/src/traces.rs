//! Export of traces to a collector.

use crate::config::{Config, OtlpProtocol};
use anyhow::{Context, Result};
use http::HeaderName;
use postrider_core::ids::Secret;
use postrider_core::time::Clock;
use postrider_core::trace::TraceShare;
use postrider_engine::clock::SystemClock;
use postrider_engine::recorder::{EventRecorder, NoRecorder, RecorderPair};
use postrider_otlp::{Exporter, OtlpEncoding};
use postrider_recorder::FlightRecorder;
use postrider_transport::HttpTransport;
use std::sync::Arc;

/// Sampled share of the traces that begin here; `None` if traces are not exported.
pub fn share(config: &Config) -> Option<TraceShare> {
    config.traces.url()?;
    Some(TraceShare::new(config.traces.sample_ratio))
}

/// The exporter of spans, unless it is disabled. Ids are derived from `log`; `chance` differs at
/// every start.
pub fn exporter(
    config: &Config,
    rules: postrider_transport::Config,
    clock: Arc<dyn Clock>,
    log: u64,
    chance: u64,
) -> Result<Option<Arc<Exporter>>> {
    let (Some(url), Some(share)) = (config.traces.url(), share(config)) else {
        return Ok(None);
    };
    let wall = Arc::new(SystemClock);
    let transport = HttpTransport::new(rules, wall.clone())?;
    let header = |(name, value): (&String, &crate::config::ConfigSecret)| -> Result<(HeaderName, Secret)> {
        let named = name.parse().with_context(|| format!("traces.headers.{name}"))?;
        Ok((named, Secret::new(value.expose())))
    };
    let exporter = postrider_otlp::Config {
        url,
        protocol: match config.traces.protocol {
            OtlpProtocol::HttpProtobuf => OtlpEncoding::HttpProtobuf,
            OtlpProtocol::HttpJson => OtlpEncoding::HttpJson,
        },
        headers: config.traces.headers.iter().map(header).collect::<Result<_>>()?,
        service_name: config.traces.service_name.clone(),
        service_version: env!("CARGO_PKG_VERSION"),
        log,
        chance,
        share,
    };
    let exporter = Exporter::start(exporter, Arc::new(transport), clock, wall).context("traces.headers")?;
    Ok(Some(exporter))
}

/// Recorder that feeds all consumers of delivery events.
pub fn told(flight: Option<&Arc<FlightRecorder>>, spans: Option<&Arc<Exporter>>) -> Arc<dyn EventRecorder> {
    match (flight, spans) {
        (None, None) => Arc::new(NoRecorder),
        (Some(flight), None) => flight.clone(),
        (None, Some(spans)) => spans.clone(),
        (Some(flight), Some(spans)) => Arc::new(RecorderPair(flight.clone(), spans.clone())),
    }
}
