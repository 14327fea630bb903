//! `postrider restore`: makes the directory of a stopped server usable again, and reports the
//! losses first.

use crate::private_files::restrict_new_files;
use crate::{offline_audit, secrets, serve, terminal};
use anyhow::{Result, bail};
use postrider_embedded::restore::{accept_damage, accept_mixed_files, forget_losses};
use serde_json::json;
use std::path::PathBuf;

/// Accept the files of a stopped server although they are of different times, or damaged
#[derive(Clone, Debug, clap::Args)]
pub struct RestoreArgs {
    /// Data directory of the stopped server
    #[arg(long, value_name = "DIR")]
    data_dir: PathBuf,
    /// Use files of different times as they are: changes that only the newer file has are lost
    #[arg(long, required_unless_present_any = ["accept_damage", "forget_losses"])]
    accept_mixed_files: bool,
    /// Replace damaged databases by what can be read of them; deliveries that may be open are made
    /// again
    #[arg(long)]
    accept_damage: bool,
    /// Clear the report of losses that earlier starts have found
    #[arg(long)]
    forget_losses: bool,
}

pub fn run(args: &RestoreArgs) -> Result<()> {
    if !args.data_dir.is_dir() {
        bail!("{} is not a directory", args.data_dir.display());
    }
    // Reading a damaged database panics; the panic is caught and reported.
    std::panic::set_hook(Box::new(|_| {}));
    restrict_new_files();
    let _lock = serve::lock(&args.data_dir)?;
    let told = restore(args);
    let details = json!({
        "acceptMixedFiles": args.accept_mixed_files,
        "acceptDamage": args.accept_damage,
        "forgetLosses": args.forget_losses,
    });
    offline_audit::record(&args.data_dir, "store.restore", details, &told);
    terminal::print(told?.join("\n"))
}

/// Report of the work, for people.
fn restore(args: &RestoreArgs) -> Result<Vec<String>> {
    let mut told = Vec::new();
    if args.accept_damage {
        let keys = secrets::keys_of_directory(&args.data_dir);
        if let Err(e) = &keys {
            told.push(format!(
                "records of catalog.redb cannot be judged by their seals: {e:#}"
            ));
        }
        told.extend(accept_damage(&args.data_dir, keys.unwrap_or(None).as_ref())?);
    }
    if args.accept_mixed_files {
        told.extend(accept_mixed_files(&args.data_dir)?);
    }
    if args.forget_losses {
        told.extend(forget_losses(&args.data_dir)?);
    }
    if told.is_empty() {
        told.push("nothing to do: the files belong together and are whole".to_owned());
    }
    Ok(told)
}
